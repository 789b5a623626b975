"""Small vectors: every rank puts its own into its slot, all meet, and each takes what it wants. One meeting.

A sum of one or two floats is done by Python's own numbers, where NumPy's call takes longer to begin than the
additions take. Storing each sum rounds it to the elements' type: Python adds in double precision, and a float32 sum
rounded from there has the same bits as one of float32 (a double has more than twice as many digits and two).
"""

from __future__ import annotations

from typing import NamedTuple

from collectives.call import Call
from collectives.fabric.layout import SLOT_BYTES, NodeMemory
from collectives.node.program import Step, Window, combine, copy

MOST_SCALARS = 2  # elements, 8 bytes of float32
MOST_BYTES = SLOT_BYTES


class Scalars(NamedTuple):
    """A sum of a few floats: `x` to `mine`, then `out` = the sum of all parts in their order, for both parities."""

    x: memoryview
    out: memoryview
    mine: tuple[memoryview, memoryview]
    first: tuple[memoryview, memoryview]
    second: tuple[memoryview, memoryview]
    more: tuple[tuple[memoryview, ...], tuple[memoryview, ...]]
    mean: bool


def puts(memory: NodeMemory, call: Call, x: Window, parity: int) -> tuple[Step, ...]:
    """What this rank brings, into its slot."""
    start, stop = 0, call.n
    if call.kind == "broadcast" and memory.rank != call.root:
        return ()
    if call.kind == "allgather":
        start, stop = call.block(memory.rank)
    return tuple(copy(_slot(memory, call, memory.rank, parity).part(start, stop), x.part(start, stop)))


def takes(memory: NodeMemory, call: Call, x: Window, out: Window, parity: int) -> tuple[Step, ...]:
    """What this rank wants, from the slots to `out`."""
    slots = [_slot(memory, call, rank, parity) for rank in range(memory.size)]
    steps: list[Step] = []
    if call.operation is not None:
        start, stop = _summed(memory, call)
        total = out.part(start, stop)
        steps += combine(call, [slot.part(start, stop) for slot in slots], total, total)
    elif call.kind == "broadcast":
        steps += copy(out.part(0, call.n), (x if memory.rank == call.root else slots[call.root]).part(0, call.n))
    else:
        mine = call.block(memory.rank)
        for rank in [memory.rank, *memory.turn()]:
            block = call.block(rank)
            source = slots[rank].part(*(mine if call.kind == "alltoall" else block))
            to = call.arrival(memory.rank, rank) if call.kind == "alltoall" else block
            steps += copy(out.part(*to), x.part(*block) if rank == memory.rank else source)
    return tuple(steps)


def scalars(memory: NodeMemory, call: Call, x: Window, out: Window) -> Scalars | None:
    """The call as a sum of a few floats; None where it is none, or where this rank does not take all of it."""
    adds = call.operation is not None and call.operation.name in ("sum", "mean")
    known = call.dtype.char in "fd" and call.dtype.isnative and x.vector.flags.aligned and out.vector.flags.aligned
    if call.kind != "allreduce" or not adds or not known or not 0 < call.n <= MOST_SCALARS or call.p == 1:
        return None
    assert call.operation is not None
    even, odd = ([_slot(memory, call, rank, parity).vector.data for rank in range(memory.size)] for parity in (0, 1))
    return Scalars(
        x.vector.data,
        out.vector.data,
        (even[memory.rank], odd[memory.rank]),
        (even[0], odd[0]),
        (even[1], odd[1]),
        (tuple(even[2:]), tuple(odd[2:])),
        call.operation.is_mean,
    )


def _slot(memory: NodeMemory, call: Call, rank: int, parity: int) -> Window:
    return Window(memory.slot(rank, parity)[: call.nbytes].view(call.dtype))


def _summed(memory: NodeMemory, call: Call) -> tuple[int, int]:
    """The elements of the reduction that this rank takes."""
    if call.kind == "reduce" and memory.rank != call.root:
        return 0, 0
    return call.block(memory.rank) if call.kind == "reduce_scatter" else (0, call.n)
