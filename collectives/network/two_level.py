"""`hierarchical` on real nodes: shared memory inside, messages between, every rank of a node driving its slice.

The schedule of `collectives.schedule.hierarchical`, its two inner stages run on loads and stores: reduce-scatter of
the node's vectors in its shared memory; allreduce of the slice, by any algorithm over messages, among the ranks with
the same place in their nodes; allgather in shared memory. The vector passes in segments, so that one is between the
nodes while the next is summed inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mpi4py import MPI

from collectives.arrays import Flat
from collectives.call import Call
from collectives.network.messages import MessagePlan
from collectives.network.tags import Tags
from collectives.node.board import Board
from collectives.schedule import catalog
from collectives.schedule.model import cut
from collectives.shared_memory.executor import Executor, Ways, part_of

SEGMENT_BYTES = 1 << 20
MOST_SEGMENTS = 8


class TwoLevelPlan:
    """One allreduce compiled for this rank. `board` is that of the node's ranks, `across` the ranks with the same place
    in theirs, one of each node; all nodes hold equally many. `between` names the algorithm over messages. Making it is
    local."""

    def __init__(
        self,
        board: Board,
        across: MPI.Comm,
        call: Call,
        x: Flat,
        out: Flat,
        ways: Ways,
        tags: Tags,
        between: str = "ring",
    ):
        if call.kind != "allreduce":
            raise ValueError(f"hierarchical serves allreduce, not {call.kind}")
        schedule = catalog.build("allreduce", between, across.size)
        count = min(MOST_SEGMENTS, max(1, call.nbytes // SEGMENT_BYTES))
        self._segments = []
        lanes = len(schedule.lanes)
        taken = tags.take(count * lanes, call.text)
        for i in range(count):
            start, stop = int(cut(call.n, count, i)), int(cut(call.n, count, i + 1))
            inside = [
                Call(kind, stop - start, call.dtype, operation, 0, call.algorithm, board.size)
                for kind, operation in (("reduce_scatter", call.operation), ("allgather", None))
            ]
            x_part, out_part = _part(x, start, stop), _part(out, start, stop)
            mine = _part(out_part, *inside[0].block(board.rank))
            slice_ = Call("allreduce", mine.n, call.dtype, call.operation, 0, between, across.size)
            self._segments.append(
                _Segment(
                    _on_node(board, inside[0], x_part, mine, ways),
                    MessagePlan(across, slice_, schedule, mine, mine, taken[i * lanes :]),
                    _on_node(board, inside[1], mine, out_part, ways),
                )
            )

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        crossing: deque[Iterator[None]] = deque()
        for segment in self._segments:
            yield from _beside(segment.scatter.steps(), crossing)
            crossing.append(segment.across.run())
        for segment in self._segments:
            first = crossing.popleft()
            yield from _beside(first, crossing)
            yield from _beside(segment.gather.steps(), crossing)

    def free(self) -> None:
        """Give the requests back to MPI."""
        for segment in self._segments:
            segment.across.free()


class _Segment(NamedTuple):
    scatter: Executor
    across: MessagePlan
    gather: Executor


def _part(flat: Flat, start: int, stop: int) -> Flat:
    return Flat(flat.address + start * flat.dtype.itemsize, stop - start, flat.dtype)


def _on_node(board: Board, call: Call, x: Flat, out: Flat, ways: Ways) -> Executor:
    return Executor(board, call.text, [part_of(call, board.rank, x, out)], ways)


def _beside(steps: Iterator[None], crossing: Iterable[Iterator[None]]) -> Iterator[None]:
    """`steps`, moving what is under way between the nodes whenever there is something to wait for, and at the end."""
    for _ in steps:
        _move(crossing)
        yield
    _move(crossing)


def _move(crossing: Iterable[Iterator[None]]) -> None:
    for steps in crossing:
        next(steps, None)
