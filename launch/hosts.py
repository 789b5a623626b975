"""Read host files, and place workers and servers on hosts. Pure, except `read`."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

NAME = re.compile(r"([\w.-]+@)?[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?", re.ASCII)


class HostError(ValueError):
    """The host file cannot be read, or the hosts cannot hold the job."""


class Host(NamedTuple):
    """A machine and the number of ranks it may hold. `slots` is None if the host file does not say."""

    name: str
    slots: int | None = None


class Placed(NamedTuple):
    """A block of consecutive ranks on one host. `ranks` is their number."""

    host: str
    ranks: int


def parse(text: str, source: str = "host file") -> tuple[Host, ...]:
    """Return the hosts of a host file in either spelling: `node1 slots=4` (Open MPI) or `node1:4` (MPICH, Intel MPI).

    Blank lines and `#` comments are skipped. A host that appears twice gets the sum of its slots. If a host is repeated
    without slots, the file has one line for each slot, as PBS and LSF write it. Raises HostError, which names the line.

    Args:
        text: The content of the file.
        source: The name of the file for error messages.
    """
    slots: dict[str, int | None] = {}
    line_a_slot = False
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        host = _parse_line(words, f"{source}, line {number}")
        if host.name not in slots:
            slots[host.name] = host.slots
            continue
        line_a_slot = line_a_slot or host.slots is None
        slots[host.name] = (slots[host.name] or 1) + (host.slots or 1)
    if not slots:
        raise HostError(f"{source} names no host: write one a line, as `node1 slots=4` or `node1:4`")
    return tuple(Host(name, count or (1 if line_a_slot else None)) for name, count in slots.items())


def _parse_line(words: Sequence[str], where: str) -> Host:
    if words[0].startswith("[") or words[0].count(":") > 1:
        raise HostError(
            f"{where}: {words[0]!r} is an IPv6 address, which no mpirun takes for a host: give it a name in /etc/hosts "
            "of every host, and write that"
        )
    name, colon, count = words[0].partition(":")
    given = [count] if colon else []
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in ("slots", "max_slots", "max-slots"):
            raise HostError(f"{where}: cannot read {word!r}; write `{name} slots=4` or `{name}:4`")
        if key == "slots":
            given.append(value)
    if not NAME.fullmatch(name):
        raise HostError(f"{where}: {name!r} is not a host name (letters, digits, '.', '-' and '_', or user@host)")
    if len(given) > 1:
        raise HostError(f"{where}: slots of {name} given twice ({' and '.join(given)})")
    if not given:
        return Host(name)
    if not given[0].isdigit() or int(given[0]) < 1:
        raise HostError(f"{where}: slots of {name} must be a whole number of at least 1, not {given[0]!r}")
    return Host(name, int(given[0]))


def read(path: str | Path) -> tuple[Host, ...]:
    """Return the hosts of the file `path`. Raises HostError if it cannot be read or parsed."""
    try:
        # -sig: some editors write a byte order mark at the beginning.
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise HostError(f"there is no host file {str(path)!r} here ({os.getcwd()})") from error
    except OSError as error:
        raise HostError(f"cannot read the host file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HostError(f"the host file {path} is no text in UTF-8 ({error.reason}): save it as that") from error
    return parse(text, str(path))


def place(hosts: Sequence[Host], workers: int, servers: int, spares: int = 0) -> tuple[Placed, ...]:
    """Place the ranks of a job on hosts, in the order of their numbers: workers, then servers, then spares.

    If possible each server has one of the last hosts for itself. If the other hosts then cannot hold the workers,
    several servers share a host. If that is not enough either, servers take the slots that the workers leave free.
    Slots are filled in the order of the file; hosts without slots share evenly. Spares are spread, one at a time, over
    the hosts that have slots left.

    Returns:
        Blocks of consecutive ranks.

    Raises:
        HostError: There are not enough slots.
    """
    total, ranks = sum(h.slots for h in hosts if h.slots is not None), workers + servers + spares
    if all(h.slots is not None for h in hosts) and total < ranks:
        also = f"{spares} spares, " if spares else ""
        raise HostError(
            f"the hosts have {total} slots, the job needs {ranks} ranks ({also}{workers} workers, "
            f"{servers} servers): add hosts or slots to the host file, or ask for fewer ranks"
        )
    placed = _working(hosts, workers, servers)
    return _blocks([*placed, *_spread(_left(hosts, placed), spares)])


def _working(hosts: Sequence[Host], workers: int, servers: int) -> list[str]:
    """Return the host of each worker, followed by the host of each server."""
    for own in range(min(servers, len(hosts) - 1), 0, -1):
        at_work, serving = hosts[:-own], hosts[-own:]
        if _holds(at_work, workers) and _holds(serving, servers):
            return [*_fill(at_work, workers), *_spread(serving, servers)]
    filled = _fill(hosts, workers)
    return [*filled, *_spread(_left(hosts, filled), servers)]


def _left(hosts: Sequence[Host], placed: Iterable[str]) -> list[Host]:
    """Return the hosts with the slots that are still free. `placed`: the host of each rank that is placed already."""
    used = Counter(placed)
    return [Host(h.name, None if h.slots is None else h.slots - used[h.name]) for h in hosts]


def _holds(hosts: Sequence[Host], ranks: int) -> bool:
    return any(h.slots is None for h in hosts) or sum(h.slots or 0 for h in hosts) >= ranks


def _fill(hosts: Sequence[Host], ranks: int) -> list[str]:
    """Return the host of each rank, filling slots in order.

    Hosts without slots share evenly, in blocks, the ranks that are more than all slots.
    """
    sharing = sum(h.slots is None for h in hosts)
    left = max(0, ranks - sum(h.slots or 0 for h in hosts))
    shares = (left * (i + 1) // sharing - left * i // sharing for i in range(sharing))
    filled: list[str] = []
    for host in hosts:
        count = next(shares) if host.slots is None else host.slots
        filled += [host.name] * min(count, ranks - len(filled))
    return filled


def _spread(hosts: Sequence[Host], ranks: int) -> list[str]:
    """Give ranks one at a time to the host that has got the fewest and still has a slot.

    Returns the host of each rank, in the order of the hosts.
    """
    counts = Counter({host.name: 0 for host in hosts})
    for _ in range(ranks):
        free = [h.name for h in hosts if h.slots is None or counts[h.name] < h.slots]
        counts[min(free, key=lambda name: counts[name])] += 1
    return list(counts.elements())


def _blocks(names: Iterable[str]) -> tuple[Placed, ...]:
    """Join adjacent ranks on the same host into one block."""
    return tuple(Placed(name, sum(1 for _ in ranks)) for name, ranks in groupby(names))
