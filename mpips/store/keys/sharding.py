"""Decide which server keeps which elements of a key: pure functions over half-open intervals.

An array of `big_array` elements is cut evenly over all servers, and so is one of a quarter of that which no server
could take without keeping much more than its share; any other lies whole on the server that holds the fewest bytes.
What a server keeps of an array is cut again into *units*: the atom of the server's state. A unit has a fixed set of
contributors, the workers that push it: every worker (dist_*), the masters (masters="one"), or one worker of each
client (masters="all", where member i of a client of p owns the i-th p-th).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

SHORT = 8  # blocks shorter than the longest by this factor cost more than they hide
CACHE_LINE = 64
MEDIUM = 4  # arrays smaller than big ones by up to this factor are cut where a server would keep
ABOVE_SHARE = 4  # more than its share of all bytes by one part of so many


class Interval(NamedTuple):
    """Elements start <= i < stop."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Unit(NamedTuple):
    """Elements [start, stop) of a key's flattened array, on one server, pushed by `contributors` (worker ranks)."""

    key: int
    server: int
    start: int
    stop: int
    contributors: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


def split(interval: Interval, parts: int, grain: int = 1) -> list[Interval]:
    """`parts` neighbouring intervals that cover `interval`; sizes differ by at most one grain, the larger
    first; cuts lie on grains.

    Grains are counted from element 0, so that cuts of a matrix with grain = row length fall between rows.
    """
    if parts < 1 or grain < 1:
        raise ValueError(f"split into parts={parts} with grain={grain}: both must be at least 1")
    first, last = -(-interval.start // grain), interval.stop // grain
    size, larger = divmod(max(last - first, 0), parts)
    cuts = [interval.start]
    for part in range(1, parts):
        cut = (first + part * size + min(part, larger)) * grain
        cuts.append(min(max(cut, cuts[-1]), interval.stop))
    cuts.append(interval.stop)
    return [Interval(a, b) for a, b in itertools.pairwise(cuts)]


def grain_of(shape: Sequence[int], parts: int) -> int:
    """Elements that stay together: a row of a matrix with enough rows to share evenly, else one element."""
    if len(shape) < 2 or shape[0] < 8 * parts:
        return 1
    size = 1
    for extent in shape[1:]:
        size *= extent
    return max(size, 1)


def block_bytes(nbytes: int, most: int, side_by_side: bool) -> int:
    """Bytes of the blocks of a unit of `nbytes` on one node, at most `most`. `side_by_side`: every process has a core,
    and a server sums one block while workers copy the next, so all but short units have two or more."""
    if not side_by_side:
        return most
    half = -(-nbytes // (2 * CACHE_LINE)) * CACHE_LINE
    return min(most, max(most // SHORT, half))


def pulled_at_once(nbytes: int, block: int, past_caches: int) -> int:
    """Blocks of `block` bytes that a pull of a unit of `nbytes` waits for, to copy them at once.

    A copy of `past_caches` bytes need not fetch what it overwrites, which saves more than to read blocks while the
    server's cache has them.
    """
    return -(-past_caches // block) if nbytes >= past_caches else 1


class Placement:
    """Bytes that each server holds; the same calls in the same order give the same places on every rank."""

    def __init__(self, servers: int, big_array: int) -> None:
        self.loads = [0] * servers
        self._big_array = big_array

    def copy(self) -> Placement:
        """Return the same loads, to place arrays on trial."""
        placement = Placement(0, self._big_array)
        placement.loads = self.loads.copy()
        return placement

    def remove_load(self, parts: Sequence[tuple[int, int]], itemsize: int) -> None:
        """(server, elements) of an array that is no longer kept."""
        for server, elements in parts:
            self.loads[server] -= elements * itemsize

    def place(self, shape: Sequence[int], itemsize: int) -> list[tuple[int, Interval]]:
        """(server, interval) pairs that cover an array; empty intervals are left out (an empty array has one)."""
        size = 1
        for extent in shape:
            size *= extent
        whole = Interval(0, size)
        emptiest = min(range(len(self.loads)), key=self.loads.__getitem__)
        if size >= self._big_array or (MEDIUM * size >= self._big_array and self._tips(emptiest, size * itemsize)):
            parts = split(whole, len(self.loads), grain_of(shape, len(self.loads)))
            pieces = [(server, part) for server, part in enumerate(parts) if part.size]
        else:
            pieces = [(emptiest, whole)]
        self.add_load(pieces, itemsize)
        return pieces

    def add_load(self, parts: Sequence[tuple[int, Interval]], itemsize: int) -> None:
        """(server, interval) pairs of an array that is kept there."""
        for server, part in parts:
            self.loads[server] += part.size * itemsize

    def _tips(self, server: int, nbytes: int) -> bool:
        """Return whether so many bytes more would make a server's load much larger than the servers' mean."""
        servers, after = len(self.loads), self.loads[server] + nbytes
        return ABOVE_SHARE * servers * after > (ABOVE_SHARE + 1) * (sum(self.loads) + nbytes)


def owners(clients: Sequence[Interval], kind: str, masters: str) -> list[list[int]]:
    """The groups that contribute once, as their owners of slices: each worker alone, each master, or whole clients."""
    if kind.startswith("dist_"):
        return [[worker] for client in clients for worker in range(*client)]
    if masters == "one":
        return [[client.start] for client in clients]
    return [list(range(*client)) for client in clients]


def units(key: int, server: int, part: Interval, groups: Sequence[Sequence[int]], grain: int = 1) -> list[Unit]:
    """The units of a server's part of a key: cut wherever any group passes from one owner to the next."""
    slices = [split(part, len(group), grain) for group in groups]
    cuts = sorted({part.start, part.stop, *(piece.start for pieces in slices for piece in pieces)})
    result = []
    for start, stop in itertools.pairwise(cuts):
        contributors = tuple(
            next(owner for owner, piece in zip(group, pieces, strict=True) if piece.start <= start < piece.stop)
            for group, pieces in zip(groups, slices, strict=True)
        )
        result.append(Unit(key, server, start, stop, contributors))
    if not result:  # an empty array still has one unit, so that a round of it can be counted
        result.append(Unit(key, server, part.start, part.stop, tuple(group[0] for group in groups)))
    return result
