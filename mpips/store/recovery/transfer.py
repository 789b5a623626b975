"""Units of the next generation take over values and state of the old ones, as the plan says.

In place, by copies on a node, or as messages between nodes. All ranks walk through one plan in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.fabric.requests import send
from mpips.optimizers import Groups, initial
from mpips.store.recovery.copies import MirroredUnits
from mpips.store.recovery.memory import NodeMemory, SurvivingUnit, UnitMemory, arrays_of_unit
from mpips.store.recovery.plan import RecoveryPlan, Transfer, UnitPlan
from mpips.store.roles import Layout
from mpips.store.server.unit import Unit
from mpips.store.transport.frames import Created, dtype_of

Array = NDArray[Any]
TAG = 5
"""Of messages with old values, on the store's communicator."""
MESSAGE_BYTES = 64 << 20


class ReachableMemory:
    """The memory that this rank reaches: its own units, those of servers that are mapped here, and copies that
    it keeps of others."""

    def __init__(
        self, node: NodeMemory, generation: int, units: Sequence[Unit] = (), owner: int = -1,
        copies: MirroredUnits | None = None,
    ) -> None:  # fmt: skip
        """`generation`: the one that is to begin. `owner`: the rank that this one had as a server."""
        self.units, self._owner, self._node, self._generation, self._copies = units, owner, node, generation, copies

    def arrays_of(self, owner: int, index: int, before: bool) -> list[Array]:
        """Return values and state of a unit; `before`: as they were a round before. Not to be changed."""
        if owner >= 0 and owner == self._owner:
            return arrays_of_unit(self.units[index], before)
        if owner < 0:
            assert self._copies is not None
            return self._copies.arrays_of(index, before)
        return self._node.arrays_of(owner, index, before, self._generation)


def make_units(
    plan: RecoveryPlan, rank: int, memory: UnitMemory, groups: Groups, reached: ReachableMemory
) -> tuple[list[Unit], Created]:
    """Return the units that the server `rank` is to have, yet to be filled, and where workers find them."""
    mine = [one for one in plan.units if one.server == rank]
    adopted = {one.card.number: reached.units[one.transfers[0].part.unit] for one in mine if one.adopted}
    return memory.make([one.card for one in mine], groups, adopted)


class UnitTransfer:
    """The transfers of one rank: it sends what others need, and fills its own new units.

    Making it posts all messages, and copies what this rank reaches; `is_over` tells when `finish` may be called.
    """

    def __init__(
        self, plan: RecoveryPlan, layout: Layout, reached: ReachableMemory, units: Sequence[Unit] = ()
    ) -> None:
        """`units`: this server's new ones, in the order of the plan."""
        self._plan, self._comm, self._reached = plan, layout.world, reached
        self._requests: list[MPI.Request] = []
        self.nbytes = 0
        """Bytes that this rank sends and receives."""
        self._left: list[tuple[UnitPlan, Unit, list[list[Array]]]] = []
        self._send(layout.rank)
        mine = [one for one in plan.units if one.server == layout.rank]
        for one, unit in zip(mine, units, strict=True):
            if one.adopted:
                _adopt(one, reached.units[one.transfers[0].part.unit], unit)
            else:
                self._left.append((one, unit, [self._take(unit, transfer) for transfer in one.transfers]))

    def is_over(self) -> bool:
        """Return whether all messages have come and gone."""
        return MPI.Request.Testall(self._requests)

    def finish(self) -> None:
        """Let the new units stand at their rounds, as all messages are there."""
        for one, unit, states in self._left:
            steps = [_step(self._plan, transfer) for transfer in one.transfers]
            state, step = _join_states(unit, one.transfers, states, steps)
            unit.stands(one.round, one.pushes, state, step, one.torn)

    def _send(self, rank: int) -> None:
        """Begin to send what other ranks need of this one's memory. Messages keep the arrays that they are made of."""
        for one in self._plan.units:
            for transfer in one.transfers:
                if transfer.sent and transfer.holder == rank:
                    part, start = transfer.part, self._plan.holding(transfer).start
                    for array in self._reached.arrays_of(part.owner, part.unit, part.before):
                        for data in _messages(array[transfer.start - start : transfer.stop - start]):
                            self.nbytes += data.nbytes
                            self._requests.append(send(self._comm, data, one.server, TAG))

    def _take(self, unit: Unit, transfer: Transfer) -> list[Array]:
        """Copy values to the unit, or begin to receive them; return the arrays of state, none where there is no
        state."""
        holding, part = self._plan.holding(transfer), transfer.part
        values = unit.stored[transfer.start - unit.start : transfer.stop - unit.start]
        if not transfer.sent:
            first, last = transfer.start - holding.start, transfer.stop - holding.start
            there, *state = self._reached.arrays_of(part.owner, part.unit, part.before)
            values[...] = there[first:last]
            return [array[first:last] for array in state]
        names = [] if _step(self._plan, transfer) is None else holding.states
        state = [np.empty(values.shape, dtype_of(name)) for name in names]
        for array in (values, *state):
            for data in _messages(array):
                self.nbytes += data.nbytes
                self._requests.append(self._comm.Irecv(data, transfer.holder, TAG))
        return state


def _adopt(plan: UnitPlan, old: Unit, unit: Unit) -> None:
    """Let the new unit have the old one's arrays: it stands where the old one does, or is put back to."""
    if plan.transfers[0].part.before:
        assert isinstance(old, SurvivingUnit)
        old.undo.back()
        old.goes_back_to(old.undo.standings()[0][1])
        old.round = plan.round
    slots = 0 if unit.optimizer is None else len(initial(unit.optimizer, unit.stored[:0]))
    state, step = (old.state, old.step) if slots == len(old.state or ()) else (None, 0)
    unit.stands(plan.round, plan.pushes, state, step, plan.torn)


def _join_states(
    unit: Unit, transfers: Sequence[Transfer], states: Sequence[list[Array]], steps: Sequence[int | None]
) -> tuple[list[Array] | None, int]:
    """Return the optimizer's state, put together, and its step. What has none yet begins with one where others have
    it."""
    known = [step for step in steps if step is not None]
    if not known or unit.optimizer is None:
        return None, 0
    probe = initial(unit.optimizer, unit.stored[:0])
    mine = unit.undo.state if unit.undo else [np.empty(unit.stored.shape, array.dtype) for array in probe]
    for transfer, state, step in zip(transfers, states, steps, strict=True):
        first, last = transfer.start - unit.start, transfer.stop - unit.start
        given = initial(unit.optimizer, unit.stored[first:last]) if step is None else state
        if [array.dtype for array in given] != [array.dtype for array in mine]:
            return None, 0  # of another optimizer, which this server has not heard of
        for array, part in zip(mine, given, strict=True):
            array[first:last] = part
    return mine, max(known)


def _step(plan: RecoveryPlan, transfer: Transfer) -> int | None:
    return plan.holding(transfer).standings[int(transfer.part.before)][1]


def _messages(array: Array) -> Iterator[NDArray[np.uint8]]:
    """Yield views of an array's bytes, each of which fits a message."""
    data = array.view(np.uint8)
    return (data[at : at + MESSAGE_BYTES] for at in range(0, data.size, MESSAGE_BYTES))
