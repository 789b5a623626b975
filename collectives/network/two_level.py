"""`hierarchical` on real nodes: shared memory inside, messages between, every rank of a node driving its slice.

The schedule of `collectives.schedule.hierarchical`, its two inner stages run on loads and stores: reduce-scatter of
the node's vectors in its shared memory; allreduce of the slice, by any algorithm over messages, among the ranks with
the same place in their nodes; allgather in shared memory. The vector passes in segments, so that one is between the
nodes while the next is summed inside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias

from collectives.arrays import Flat
from collectives.call import Call
from collectives.network.messages import MessagePlan
from collectives.network.tags import Tags
from collectives.schedule import catalog
from collectives.schedule.model import cut

Steps: TypeAlias = "Callable[[], Iterator[None]]"
SEGMENT_BYTES = 1 << 20
MOST_SEGMENTS = 8


class TwoLevelPlan:
    """One allreduce compiled for this rank, the one at `place` of the `local` ranks of its node; all nodes hold equally
    many. `on_node` compiles a call between them, and gives back what makes its steps. `between` names the algorithm
    over messages. Making it is local."""

    def __init__(
        self,
        place: int,
        local: int,
        on_node: Callable[[Call, Flat, Flat], Steps],
        call: Call,
        x: Flat,
        out: Flat,
        tags: Tags,
        between: str = "ring",
    ):
        if call.kind != "allreduce":
            raise ValueError(f"hierarchical serves allreduce, not {call.kind}")
        across = tags.lanes.across
        assert across is not None
        schedule = catalog.build("allreduce", between, across.size)
        count = min(MOST_SEGMENTS, max(1, call.nbytes // SEGMENT_BYTES))
        self._segments = []
        lanes = len(schedule.lanes)
        taken = tags.take(count * lanes, call.text)
        for i in range(count):
            start, stop = int(cut(call.n, count, i)), int(cut(call.n, count, i + 1))
            inside = [
                Call(kind, stop - start, call.dtype, operation, 0, call.algorithm, local, call.label)
                for kind, operation in (("reduce_scatter", call.operation), ("allgather", None))
            ]
            x_part, out_part = _part(x, start, stop), _part(out, start, stop)
            mine = _part(out_part, *inside[0].block(place))
            slice_ = Call("allreduce", mine.n, call.dtype, call.operation, 0, between, across.size)
            self._segments.append(
                _Segment(
                    on_node(inside[0], x_part, mine),
                    MessagePlan(across, slice_, schedule, mine, mine, taken[i * lanes :]),
                    on_node(inside[1], mine, out_part),
                )
            )

    def run(self) -> Iterator[None]:
        """The operation, in steps between which there is something to wait for."""
        crossing: deque[Iterator[None]] = deque()
        for segment in self._segments:
            yield from _beside(segment.scatter(), crossing)
            crossing.append(segment.across.run())
        for segment in self._segments:
            first = crossing.popleft()
            yield from _beside(first, crossing)
            yield from _beside(segment.gather(), crossing)

    def free(self) -> None:
        """Give the requests back to MPI."""
        for segment in self._segments:
            segment.across.free()


class _Segment(NamedTuple):
    scatter: Steps
    across: MessagePlan
    gather: Steps


def _part(flat: Flat, start: int, stop: int) -> Flat:
    return Flat(flat.address + start * flat.dtype.itemsize, stop - start, flat.dtype)


def _beside(steps: Iterator[None], crossing: Iterable[Iterator[None]]) -> Iterator[None]:
    """`steps`, moving what is under way between the nodes whenever there is something to wait for, and at the end."""
    for _ in steps:
        _move(crossing)
        yield
    _move(crossing)


def _move(crossing: Iterable[Iterator[None]]) -> None:
    for steps in crossing:
        next(steps, None)
