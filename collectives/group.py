"""`grouped_allreduce`: one call reduces several arrays, each separately. Small arrays are packed into one vector.

On one node, the ranks wait for each other only twice, however many arrays the call has. Between nodes, all arrays of an
element type are sent as one vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mpips.collectives import arrays as user_arrays
from mpips.collectives.arrays import Flat, Vector, type_name
from mpips.collectives.call import Call, Runner, find_reduction
from mpips.collectives.communicator import Communicator
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.requests import Tags
from mpips.collectives.kernels.sums import perform
from mpips.collectives.node.executor import DONE, NodeExecutor, call_array, not_begun
from mpips.collectives.node.program import Copy, copy, steps_of
from mpips.collectives.runner import make_runner, resolve_algorithm, way_limits
from mpips.collectives.schedule.model import cut

# On one node, arrays of up to this size are copied into a common vector. Larger arrays are reduced in place.
PACKED_BYTES = 64 << 10


@dataclass(frozen=True)
class GroupCall(Call):
    """A `grouped_allreduce`, in the form that ranks compare. `n` is the number of bytes of all arrays together."""

    # the sizes and types of the arrays, and the operation, in words
    arrays: str = ""

    def describe(self) -> str:
        return f"grouped_allreduce of {self.arrays}, algorithm {self.algorithm}"


class PackedRunner:
    """A runner that packs arrays into common vectors, lets other runners reduce the vectors, and unpacks the results.

    Args:
        runners: One runner for each vector. On one node, a single runner for all vectors.
        into: The steps that copy the arrays into the vectors.
        back: The steps that copy the results out of the vectors.
    """

    holds = True

    def __init__(self, runners: Sequence[Runner], into: Sequence[Copy], back: Sequence[Copy]) -> None:
        self._runners = runners
        self._into = steps_of(into)
        self._back = steps_of(back)
        self.fast: Callable[[], int] = self._fast if len(runners) == 1 else not_begun

    def steps(self) -> Iterator[None]:
        perform(self._into)
        for runner in self._runners:
            yield from runner.steps()
        perform(self._back)

    def rest(self) -> Iterator[None]:
        yield from self._runners[0].rest()
        perform(self._back)

    def free(self) -> None:
        for runner in self._runners:
            runner.free()

    def _fast(self) -> int:
        perform(self._into)
        code = self._runners[0].fast()
        if code == DONE:
            perform(self._back)
        return code


def compile_group(
    home: Communicator,
    x: Sequence[Any],
    op: str,
    algorithm: str,
    out: Sequence[Any] | None,
    label: str = "",
    blocks: Sequence[Any] | None = None,
) -> tuple[Call, Runner]:
    """Check the arguments of a `grouped_allreduce` and compile it. Local.

    Args:
        home: The communicator.
        x: The arrays to reduce.
        op: The name of the reduction.
        algorithm: The name of the algorithm, or "auto".
        out: The arrays for the results. None: the results overwrite `x`.
        label: The caller's name for this call.
        blocks: For each array either None, or an array that gets a copy of this rank's block of the result.

    Returns:
        The call, in the form in which ranks compare it, and its runner.

    Raises:
        ValueError, TypeError: An argument is invalid.
    """
    sources, targets = _flats(x, out)
    block_copies = _block_copies(sources, blocks)
    for source in sources:
        find_reduction(op, source.dtype)
    text = f"{len(sources)} arrays ({', '.join(f'{flat.n} {type_name(flat.dtype)}' for flat in sources)}), {op}"
    raw = GroupCall(
        "allreduce",
        sum(_nbytes(flat) for flat in sources),
        np.dtype(np.uint8),
        None,
        0,
        algorithm,
        home.size,
        label,
        arrays=text,
    )
    pairs = [pair for pair in _drop_repeated([*zip(sources, targets)], block_copies) if pair.source.n]
    on_node = resolve_algorithm(home, raw, algorithm) == "shared_memory"
    runner = (_on_node if on_node else _over_messages)(home, raw, op, pairs)
    return raw, runner


def _flats(x: Sequence[Any], out: Sequence[Any] | None) -> tuple[list[Flat], list[Flat]]:
    if out is not None and len(out) != len(x):
        raise ValueError(f"arrays has {len(x)} arrays and out {len(out)}: give the same number of each")
    hosts = [user_arrays.host(array, f"arrays[{i}]") for i, array in enumerate(x)]
    sources = [user_arrays.flat(array, f"arrays[{i}]", out is None) for i, array in enumerate(hosts)]
    if out is None:
        return sources, sources
    targets = [user_arrays.flat(user_arrays.host(array, f"out[{i}]"), f"out[{i}]", True) for i, array in enumerate(out)]
    for i, (source, target) in enumerate(zip(sources, targets)):
        if (source.n, source.dtype) != (target.n, target.dtype):
            raise ValueError(
                f"arrays[{i}] has {source.n} {type_name(source.dtype)} and out[{i}] {target.n} "
                f"{type_name(target.dtype)}: give both the same size and type"
            )
    return sources, targets


def _block_copies(sources: Sequence[Flat], blocks: Sequence[Any] | None) -> list[tuple[Flat, ...]]:
    """Check `blocks`, which has one entry for each array: None, or an array that gets a copy of this rank's block.

    Return for each array a tuple with its entry as a vector, or () if the entry is None.
    """
    block_copies: list[tuple[Flat, ...]] = []
    for i, (source, block) in enumerate(zip(sources, blocks or [None] * len(sources), strict=True)):
        if block is None:
            block_copies.append(())
            continue
        vector = user_arrays.flat(block, f"blocks[{i}]", True)
        if (vector.n, vector.dtype) != (source.n, source.dtype):
            raise ValueError(
                f"blocks[{i}] has {vector.n} {type_name(vector.dtype)} and arrays[{i}] {source.n} "
                f"{type_name(source.dtype)}: give both the same size and type"
            )
        block_copies.append((vector,))
    return block_copies


class OverlapError(ValueError):
    """A result would overwrite part of an array that is still to be read."""


class _Pair(NamedTuple):
    """An array, the array for its result, and further arrays that get a copy of this rank's block of the result."""

    source: Flat
    target: Flat
    block_copies: tuple[Flat, ...] = ()


def _drop_repeated(pairs: Sequence[tuple[Flat, Flat]], block_copies: Sequence[tuple[Flat, ...]]) -> list[_Pair]:
    """Drop repeated arrays: an array that is passed twice, as tied weights are, is reduced once.

    Raises OverlapError if a result would overwrite part of another array, or of its own source.
    """
    # pair -> its index in `pairs`; the lowest index if the pair is passed several times
    once: dict[tuple[Flat, Flat], int] = {}
    # pair -> all arrays that get a copy of its block
    every: dict[tuple[Flat, Flat], tuple[Flat, ...]] = {}
    for number, pair in enumerate(pairs):
        once.setdefault(pair, number)
        every[pair] = (*every.get(pair, ()), *block_copies[number])
    # (start address, end address, index of the pair, True if the array is written) of every array. Two arrays may
    # overlap only if both are only read. The loop below takes the arrays in the order of their addresses. An array
    # overlaps an earlier one if it begins before the furthest end of all earlier arrays. `end`, `last` and `written`
    # describe the array that has this furthest end.
    extents = []
    for (source, target), number in once.items():
        extents.append((target.address, target.address + _nbytes(target), number, True))
        if source != target:
            extents.append((source.address, source.address + _nbytes(source), number, False))
    end, last, written = 0, -1, False
    for start, stop, number, writes in sorted(extents):
        if start < end and (writes or written):
            both = f"arrays {last} and {number} overlap" if number != last else f"arrays[{number}] and its out overlap"
            raise OverlapError(f"{both}, and a result goes there: give each its own memory")
        if stop > end:
            end, last, written = stop, number, writes
    return [_Pair(*pair, every[pair]) for pair in once]


def _on_node(home: Communicator, call: GroupCall, op: str, pairs: Sequence[_Pair]) -> Runner:
    reachable = home.board.memory.reachable
    small, large = list[_Pair](), list[_Pair]()
    for pair in pairs:
        (small if not reachable or _nbytes(pair.source) <= PACKED_BYTES else large).append(pair)
    parts = [call_array(_call(home, pair.source, op, "shared_memory", call.label), home.rank, *pair) for pair in large]
    packs = _pack(home, small, arena.empty)
    packed = [flat for flat, _, _ in packs]
    parts += [call_array(_call(home, flat, op, "shared_memory", call.label), home.rank, flat, flat) for flat in packed]
    # A call of a single array may run as a program of slots or stages (`node.program`). Those programs copy nothing to
    # `blocks`. A call of two arrays never runs as one, so add an empty second array.
    if not parts or (len(parts) == 1 and not packs):
        empty = user_arrays.flat(np.empty(0, np.float32), "x", True)
        parts.append(call_array(_call(home, empty, op, "shared_memory", call.label), home.rank, empty, empty))
    executor = NodeExecutor(home.board, call.text, parts, way_limits(home, home.size))
    return _packed([executor], packs)


def _over_messages(home: Communicator, call: GroupCall, op: str, pairs: Sequence[_Pair]) -> Runner:
    packs = _pack(home, pairs, np.empty)
    calls = [_call(home, flat, op, call.algorithm, call.label) for flat, _, _ in packs]
    runners = [make_runner(home, inner, flat, flat, Tags(home.lanes)) for inner, (flat, _, _) in zip(calls, packs)]
    return _packed(runners, packs)


def _packed(runners: Sequence[Runner], packs: Sequence[tuple[Flat, list[Copy], list[Copy]]]) -> PackedRunner:
    into = [copy for _, copies, _ in packs for copy in copies]
    back = [copy for _, _, copies in packs for copy in copies]
    return PackedRunner(runners, into, back)


def _call(home: Communicator, flat: Flat, op: str, algorithm: str, label: str) -> Call:
    draft = Call("allreduce", flat.n, flat.dtype, find_reduction(op, flat.dtype), 0, "auto", home.size)
    return Call(
        "allreduce", flat.n, flat.dtype, draft.reduction, 0, resolve_algorithm(home, draft, algorithm), home.size, label
    )


def _pack(
    home: Communicator, pairs: Sequence[_Pair], allocate: Callable[[int, Any], Vector]
) -> list[tuple[Flat, list[Copy], list[Copy]]]:
    """Pack the arrays of each element type into one vector.

    Return for each type a tuple: the vector, the copies of the arrays into the vector, and the copies of the results
    out of the vector.
    """
    packs = []
    for dtype in dict.fromkeys(pair.source.dtype for pair in pairs):
        alike = [pair for pair in pairs if pair.source.dtype == dtype]
        vector = allocate(sum(pair.source.n for pair in alike), dtype)
        into: list[Copy] = []
        back: list[Copy] = []
        at = 0
        for source, target, block_copies in alike:
            beside = vector[at : at + source.n]
            into += copy(beside, source.vector())
            back += copy(target.vector(), beside)
            start, stop = (int(cut(source.n, home.size, rank)) for rank in (home.rank, home.rank + 1))
            for block in block_copies:
                back += copy(block.vector()[start:stop], beside[start:stop])
            at += source.n
        packs.append((user_arrays.flat(vector, "x", True), into, back))
    return packs


def _nbytes(flat: Flat) -> int:
    return flat.n * flat.dtype.itemsize
