"""The protocol for small vectors: all ranks put theirs into their slots, and each takes what it wants.

See `collectives.transport.shared_memory`.
"""

from __future__ import annotations

from collectives.call import Call
from collectives.transport import few, flat
from collectives.transport.flat import Lines, Turns
from collectives.transport.program import Step, Window, combine, copy
from collectives.transport.room import Room


def puts(room: Room, call: Call, x: Window, parity: int) -> tuple[Step, ...]:
    """What this rank brings, into its slot."""
    start, stop = _brought(room, call)
    return tuple(copy(_slot(room, call, room.rank, parity).part(start, stop), x.part(start, stop)))


def takes(room: Room, call: Call, x: Window, out: Window, parity: int) -> tuple[Step, ...]:
    """What this rank wants, from the slots to `out`."""
    slots = [_slot(room, call, rank, parity) for rank in range(room.size)]
    steps: list[Step] = []
    if call.operation is not None:
        start, stop = _summed(room, call)
        total = out.part(start, stop)
        steps += combine(call, [slot.part(start, stop) for slot in slots], total, total)
    elif call.kind == "broadcast":
        steps += copy(out.part(0, call.n), (x if room.rank == call.root else slots[call.root]).part(0, call.n))
    else:
        mine = call.block(room.rank)
        for rank in [room.rank, *room.turn()]:
            block = call.block(rank)
            source = slots[rank].part(*(mine if call.kind == "alltoall" else block))
            to = call.arrival(room.rank, rank) if call.kind == "alltoall" else block
            steps += copy(out.part(*to), x.part(*block) if rank == room.rank else source)
    return tuple(steps)


def lines(room: Room, call: Call, x: Window, out: Window, puts: Turns, takes: Turns) -> tuple[Lines, Lines]:
    """These steps as a flat function has them: a few numbers without steps."""
    slots = [[_slot(room, call, rank, parity) for rank in range(room.size)] for parity in (0, 1)]
    start, stop = _brought(room, call)
    put = few.puts(call, x.part(start, stop), [every[room.rank].part(start, stop) for every in slots])
    start, stop = _summed(room, call)
    take = few.takes(call, out.part(start, stop), [[slot.part(start, stop) for slot in every] for every in slots])
    return put or flat.loop("puts", puts), take or flat.loop("takes", takes)


def _slot(room: Room, call: Call, rank: int, parity: int) -> Window:
    return Window(room.slot(rank, parity)[: call.nbytes].view(call.dtype))


def _brought(room: Room, call: Call) -> tuple[int, int]:
    """The elements that this rank puts into its slot."""
    if call.kind == "broadcast" and room.rank != call.root:
        return 0, 0
    return call.block(room.rank) if call.kind == "allgather" else (0, call.n)


def _summed(room: Room, call: Call) -> tuple[int, int]:
    """The elements of the reduction, where the call is one, that this rank takes."""
    if call.kind == "reduce" and room.rank != call.root:
        return 0, 0
    return call.block(room.rank) if call.kind == "reduce_scatter" else (0, call.n)
