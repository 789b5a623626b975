"""Decide which server keeps which elements of a key. Pure functions over half-open intervals.

An array of `big_array` elements or more is cut evenly over all servers. Any other array goes as a whole to the server
that holds the fewest bytes, with one exception: an array of at least a quarter of `big_array` elements is cut if that
server would otherwise hold much more than its share of all bytes.

A server's part of an array is cut again into *units*, the smallest parts of a server's state. A unit always has the
same contributors, which are the workers that push to it. In dist_* stores all workers contribute to every unit. In
mpi_* stores workers form *clients*, groups that sum before they push. With masters="one" the first worker of each
client, its master, contributes to every unit. With masters="all" one member of each client contributes to a unit:
member i of p pushes the i-th of p slices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

# Blocks are never shorter than the longest allowed block divided by this number. Shorter blocks would cost more time
# than the overlap of summing and copying saves.
SHORT = 8
CACHE_LINE = 64
# An array of at least big_array / MEDIUM elements is cut if a server that took the whole array would hold more than
# (1 + 1 / ABOVE_SHARE) times its share of all bytes.
MEDIUM = 4
ABOVE_SHARE = 4


class Interval(NamedTuple):
    """The elements i with start <= i < stop."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class CutUnit(NamedTuple):
    """Elements [start, stop) of a key's flattened array, on one server. The ranks in `contributors` push them."""

    key: int
    server: int
    start: int
    stop: int
    contributors: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.stop - self.start


def split(interval: Interval, parts: int, grain: int = 1) -> list[Interval]:
    """Cut an interval into `parts` adjacent intervals whose sizes differ by at most one grain, larger ones first.

    Cuts are at multiples of `grain`, counted from element 0. If `grain` is the length of a row, a matrix is cut between
    rows.
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
    """Return the number of elements that must stay together when an array of this shape is cut into `parts`.

    This is the length of a row if there are enough rows to make the parts about equal, and 1 otherwise.
    """
    if len(shape) < 2 or shape[0] < 8 * parts:
        return 1
    size = 1
    for extent in shape[1:]:
        size *= extent
    return max(size, 1)


def block_bytes(nbytes: int, most: int, side_by_side: bool) -> int:
    """Return the block size for a unit of `nbytes` whose contributors are on the server's node.

    Args:
        most: The largest block size allowed.
        side_by_side: True if every process has a core of its own. Then the server sums one block while workers copy the
            next. So every unit that is not short gets at least two blocks.
    """
    if not side_by_side:
        return most
    half = -(-nbytes // (2 * CACHE_LINE)) * CACHE_LINE
    return min(most, max(most // SHORT, half))


def pulled_at_once(nbytes: int, block: int, past_caches: int) -> int:
    """Return the number of blocks of `block` bytes that a pull waits for and then copies with one call.

    A copy of at least `past_caches` bytes bypasses the caches when it writes, so it does not fetch the cache lines that
    it overwrites. This saves more time than a copy of each block while the block is still in the server's cache. Pulls
    of fewer bytes copy one block at a time.
    """
    return -(-past_caches // block) if nbytes >= past_caches else 1


class Placement:
    """Chooses servers for arrays, so that servers hold about equally many bytes.

    All ranks make the same calls in the same order, and so get the same result.
    """

    def __init__(self, servers: int, big_array: int) -> None:
        self.loads = [0] * servers
        self._big_array = big_array

    def copy(self) -> Placement:
        """Return a copy. A caller first places arrays with the copy, and keeps the copy only if nothing fails."""
        placement = Placement(0, self._big_array)
        placement.loads = self.loads.copy()
        return placement

    def remove_load(self, parts: Sequence[tuple[int, int]], itemsize: int) -> None:
        """Subtract a removed array from the loads of its servers. `parts`: (server, number of elements)."""
        for server, elements in parts:
            self.loads[server] -= elements * itemsize

    def place(self, shape: Sequence[int], itemsize: int) -> list[tuple[int, Interval]]:
        """Choose servers for an array and add it to their loads. Return (server, interval) pairs that cover the array.

        The pairs have no empty intervals, except that an empty array gets one pair with an empty interval.
        """
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
        """Add an array to the loads of its servers. `parts`: (server, interval)."""
        for server, part in parts:
            self.loads[server] += part.size * itemsize

    def _tips(self, server: int, nbytes: int) -> bool:
        """True if `nbytes` more bytes would make this server's load much larger than the mean load of the servers."""
        servers, after = len(self.loads), self.loads[server] + nbytes
        return ABOVE_SHARE * servers * after > (ABOVE_SHARE + 1) * (sum(self.loads) + nbytes)


def owners(clients: Sequence[Interval], kind: str, masters: str) -> list[list[int]]:
    """Return the groups of workers that contribute to a key. Each group as a whole pushes every element once.

    In dist_* stores a group is a single worker. With masters="one" a group is the master of a client. With
    masters="all" a group is all members of a client, and each member pushes one slice.
    """
    if kind.startswith("dist_"):
        return [[worker] for client in clients for worker in range(*client)]
    if masters == "one":
        return [[client.start] for client in clients]
    return [list(range(*client)) for client in clients]


def units(key: int, server: int, part: Interval, groups: Sequence[Sequence[int]], grain: int = 1) -> list[CutUnit]:
    """Cut a server's part of a key into units, at each point where the slice of a worker ends in any group."""
    slices = [split(part, len(group), grain) for group in groups]
    cuts = sorted({part.start, part.stop, *(piece.start for pieces in slices for piece in pieces)})
    result = []
    for start, stop in itertools.pairwise(cuts):
        contributors = tuple(
            next(owner for owner, piece in zip(group, pieces, strict=True) if piece.start <= start < piece.stop)
            for group, pieces in zip(groups, slices, strict=True)
        )
        result.append(CutUnit(key, server, start, stop, contributors))
    # An empty array also gets a unit, because rounds are counted even for an empty array.
    if not result:
        result.append(CutUnit(key, server, part.start, part.stop, tuple(group[0] for group in groups)))
    return result
