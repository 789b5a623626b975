"""Read host files, and place workers, servers and spares on hosts. All functions are pure, except `read`."""

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
    """A machine and the number of ranks it may hold. `slots` is None if the host file gives no number."""

    name: str
    slots: int | None = None


class RankBlock(NamedTuple):
    """Consecutive ranks on one host."""

    host: str
    # number of ranks in the block
    ranks: int


def parse(text: str, source: str = "host file") -> tuple[Host, ...]:
    """Return the hosts of a host file in either spelling: `node1 slots=4` (Open MPI) or `node1:4` (MPICH, Intel MPI).

    Blank lines and `#` comments are skipped. A host that appears twice gets the sum of its slots. If a host is repeated
    without slots, every line of the file without slots counts as one slot: PBS and LSF write such files.

    Args:
        text: The content of the file.
        source: The name of the file for error messages.

    Raises:
        HostError: A line cannot be read, or the file names no host. The message names the line.
    """
    slots: dict[str, int | None] = {}
    one_slot_per_line = False
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split("#", 1)[0].split()
        if not fields:
            continue
        host = _parse_line(fields, f"{source}, line {number}")
        if host.name not in slots:
            slots[host.name] = host.slots
            continue
        one_slot_per_line = one_slot_per_line or host.slots is None
        slots[host.name] = (slots[host.name] or 1) + (host.slots or 1)
    if not slots:
        raise HostError(f"{source} names no host: write one a line, as `node1 slots=4` or `node1:4`")
    return tuple(Host(name, count or (1 if one_slot_per_line else None)) for name, count in slots.items())


def _parse_line(fields: Sequence[str], where: str) -> Host:
    if fields[0].startswith("[") or fields[0].count(":") > 1:
        raise HostError(
            f"{where}: {fields[0]!r} is an IPv6 address, which no mpirun takes for a host: give it a name in "
            "/etc/hosts of every host, and write that"
        )
    name, colon, count = fields[0].partition(":")
    slots = [count] if colon else []
    for field in fields[1:]:
        key, equals, value = field.partition("=")
        if not equals or key not in ("slots", "max_slots", "max-slots"):
            raise HostError(f"{where}: cannot read {field!r}; write `{name} slots=4` or `{name}:4`")
        if key == "slots":
            slots.append(value)
    if not NAME.fullmatch(name):
        raise HostError(f"{where}: {name!r} is not a host name (letters, digits, '.', '-' and '_', or user@host)")
    if len(slots) > 1:
        raise HostError(f"{where}: slots of {name} given twice ({' and '.join(slots)})")
    if not slots:
        return Host(name)
    if not slots[0].isdigit() or int(slots[0]) < 1:
        raise HostError(f"{where}: slots of {name} must be a whole number of at least 1, not {slots[0]!r}")
    return Host(name, int(slots[0]))


def read(path: str | Path) -> tuple[Host, ...]:
    """Return the hosts of the file `path`. Raises HostError if it cannot be read or parsed."""
    try:
        # "utf-8-sig", because some editors write a byte order mark at the beginning.
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise HostError(f"there is no host file {str(path)!r} here ({os.getcwd()})") from error
    except OSError as error:
        raise HostError(f"cannot read the host file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise HostError(f"the host file {path} is not UTF-8 text ({error.reason}): save it as that") from error
    return parse(text, str(path))


def place(hosts: Sequence[Host], workers: int, servers: int, spares: int = 0) -> tuple[RankBlock, ...]:
    """Place the ranks of a job on hosts. Workers have the lowest ranks, then come servers, then spares.

    If possible, each server gets one of the last hosts for itself. If the remaining hosts then have too few slots for
    the workers, several servers share a host. If there are still too few, servers take the slots that the workers leave
    free. Workers fill the slots in the order of the hosts. Hosts without a number of slots share the remaining ranks
    evenly. Spares are placed one at a time, each on the host that has the fewest spares and a free slot.

    Returns:
        Blocks of consecutive ranks, in the order of the ranks.

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
    placed = _place_without_spares(hosts, workers, servers)
    return _join_blocks([*placed, *_spread(_subtract(hosts, placed), spares)])


def _place_without_spares(hosts: Sequence[Host], workers: int, servers: int) -> list[str]:
    """Return the host of each worker, followed by the host of each server."""
    for count in range(min(servers, len(hosts) - 1), 0, -1):
        worker_hosts, server_hosts = hosts[:-count], hosts[-count:]
        if _can_hold(worker_hosts, workers) and _can_hold(server_hosts, servers):
            return [*_fill(worker_hosts, workers), *_spread(server_hosts, servers)]
    filled = _fill(hosts, workers)
    return [*filled, *_spread(_subtract(hosts, filled), servers)]


def _subtract(hosts: Sequence[Host], placed: Iterable[str]) -> list[Host]:
    """Return the hosts, each with the number of its slots that are still free.

    `placed` holds, for each rank that has already been placed, the name of the rank's host.
    """
    used = Counter(placed)
    return [Host(h.name, None if h.slots is None else h.slots - used[h.name]) for h in hosts]


def _can_hold(hosts: Sequence[Host], ranks: int) -> bool:
    return any(h.slots is None for h in hosts) or sum(h.slots or 0 for h in hosts) >= ranks


def _fill(hosts: Sequence[Host], ranks: int) -> list[str]:
    """Return the name of each rank's host. Slots are filled in the order of the hosts.

    Hosts without a number of slots share the ranks for which the other hosts have no room, in blocks of equal size.
    """
    sharing = sum(h.slots is None for h in hosts)
    rest = max(0, ranks - sum(h.slots or 0 for h in hosts))
    shares = (rest * (i + 1) // sharing - rest * i // sharing for i in range(sharing))
    filled: list[str] = []
    for host in hosts:
        count = next(shares) if host.slots is None else host.slots
        filled += [host.name] * min(count, ranks - len(filled))
    return filled


def _spread(hosts: Sequence[Host], ranks: int) -> list[str]:
    """Place ranks one at a time, each on the host that has the fewest of these ranks and still has a free slot.

    Returns the name of each rank's host, in the order of the hosts.
    """
    counts = Counter({host.name: 0 for host in hosts})
    for _ in range(ranks):
        free = [h.name for h in hosts if h.slots is None or counts[h.name] < h.slots]
        counts[min(free, key=lambda name: counts[name])] += 1
    return list(counts.elements())


def _join_blocks(names: Iterable[str]) -> tuple[RankBlock, ...]:
    """Join adjacent ranks on the same host into one block."""
    return tuple(RankBlock(name, sum(1 for _ in ranks)) for name, ranks in groupby(names))
