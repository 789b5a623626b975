"""Hosts: reading host files, and placing workers and servers on hosts. Pure, except `read`."""

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
    """A host file that cannot be read, or hosts that cannot hold the job."""


class Host(NamedTuple):
    """One machine and how many ranks it may hold; `slots` is None where the file does not say."""

    name: str
    slots: int | None = None


class Placed(NamedTuple):
    """`ranks` consecutive ranks on one host."""

    host: str
    ranks: int


def parse(text: str, source: str = "host file") -> tuple[Host, ...]:
    """Return hosts of a host file in either spelling: `node1 slots=4` (Open MPI) or `node1:4` (MPICH, Intel MPI).

    Blank lines and `#` comments are skipped; a host named twice has the sum of its slots. A file that repeats hosts
    without slots has a line a slot, as PBS and LSF write it. HostError names the line.
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
    """Return hosts of the file `path`. Raises HostError where it cannot be read or understood."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # editors of other systems begin a file with a mark
    except FileNotFoundError as error:
        raise HostError(f"there is no host file {str(path)!r} here ({os.getcwd()})") from error
    except OSError as error:
        raise HostError(f"cannot read the host file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HostError(f"the host file {path} is no text in UTF-8 ({error.reason}): save it as that") from error
    return parse(text, str(path))


def place(hosts: Sequence[Host], workers: int, servers: int, spares: int = 0) -> tuple[Placed, ...]:
    """Return blocks of consecutive ranks on hosts, workers first, then servers, then spares, as mpips numbers its
    ranks.

    Servers get the last hosts for themselves, one each, as long as the other hosts hold the workers; else several
    servers share one; else they take the free slots beside the workers. Slots are filled in the order of the file;
    hosts without slots share evenly. Spares are spread, one at a time, over the hosts that have slots left. Raises
    HostError where the slots do not suffice.
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
    """Return the host of every worker, then of every server."""
    for own in range(min(servers, len(hosts) - 1), 0, -1):
        at_work, serving = hosts[:-own], hosts[-own:]
        if _holds(at_work, workers) and _holds(serving, servers):
            return [*_fill(at_work, workers), *_spread(serving, servers)]
    filled = _fill(hosts, workers)
    return [*filled, *_spread(_left(hosts, filled), servers)]


def _left(hosts: Sequence[Host], placed: Iterable[str]) -> list[Host]:
    """Return the hosts with the slots that these ranks leave."""
    used = Counter(placed)
    return [Host(h.name, None if h.slots is None else h.slots - used[h.name]) for h in hosts]


def _holds(hosts: Sequence[Host], ranks: int) -> bool:
    return any(h.slots is None for h in hosts) or sum(h.slots or 0 for h in hosts) >= ranks


def _fill(hosts: Sequence[Host], ranks: int) -> list[str]:
    """Return the host of every rank: given slots in order; hosts without slots share what is left, evenly, in
    blocks."""
    sharing = sum(h.slots is None for h in hosts)
    left = max(0, ranks - sum(h.slots or 0 for h in hosts))
    shares = (left * (i + 1) // sharing - left * i // sharing for i in range(sharing))
    filled: list[str] = []
    for host in hosts:
        count = next(shares) if host.slots is None else host.slots
        filled += [host.name] * min(count, ranks - len(filled))
    return filled


def _spread(hosts: Sequence[Host], ranks: int) -> list[str]:
    """Return one rank at a time to the host with the fewest of them that still has a slot; in the order of the
    hosts."""
    counts = Counter({host.name: 0 for host in hosts})
    for _ in range(ranks):
        free = [h.name for h in hosts if h.slots is None or counts[h.name] < h.slots]
        counts[min(free, key=lambda name: counts[name])] += 1
    return list(counts.elements())


def _blocks(names: Iterable[str]) -> tuple[Placed, ...]:
    """Neighbouring ranks of the same host are one block."""
    return tuple(Placed(name, sum(1 for _ in ranks)) for name, ranks in groupby(names))
