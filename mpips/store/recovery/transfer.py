"""Units of the next generation take over values and state of the old ones, as the plan says.

In place, by copies on a node, or as messages between nodes. All ranks walk through one plan in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.network.failures import send
from mpips.optimizers import Groups, initial
from mpips.store.recovery.copies import MirroredUnits
from mpips.store.recovery.memory import Made, NodeMemory, SurvivingUnit, UnitMemory, unit_arrays
from mpips.store.recovery.plan import Holding, RecoveryPlan, Transfer, UnitPlan
from mpips.store.roles import Layout
from mpips.store.server.unit import Unit
from mpips.store.transport.frames import dtype_of

Array = NDArray[Any]
TAG = 5
"""Of messages with old values, on the store's communicator."""
MESSAGE_BYTES = 64 << 20


class ReachableMemory:
    """What is in memory that this rank reaches: its own units, those of servers that are mapped here, and copies that
    it keeps of others."""

    def __init__(
        self, units: Sequence[Unit], owner: int, held: NodeMemory, generation: int, copies: MirroredUnits | None = None
    ) -> None:  # fmt: skip
        """`owner`: the rank that this one had as a server. `generation`: the one that is to begin."""
        self.units, self._owner, self._held, self._generation, self._copies = units, owner, held, generation, copies

    def arrays_of(self, owner: int, index: int, before: bool) -> list[Array]:
        """Values and state of a unit; `before`: as they were a round before. Not to be changed."""
        if owner == self._owner:
            return unit_arrays(self.units[index], before)
        if owner < 0:
            assert self._copies is not None
            return self._copies.at(index, before)
        return self._held.arrays_of(owner, index, before, self._generation)


def server(layout: Layout, plan: RecoveryPlan, memory: UnitMemory, groups: Groups, there: ReachableMemory) -> Filled:
    """Make this server's units, and begin to fill them and to send what others need."""
    fillings = [filling for filling in plan.fillings if filling.server == layout.rank]
    adopted = {
        filling.card.number: there.units[filling.transfers[0].part.unit] for filling in fillings if filling.adopted
    }  # fmt: skip
    made = memory.make([filling.card for filling in fillings], groups, adopted)
    filled = Filled(plan, layout, made, there)
    filled.requests += sends(plan, layout, there)
    for filling, unit in zip(fillings, made.units, strict=True):
        if filling.adopted:
            _adopt(filling, adopted[unit.number], unit)
        else:
            filled.begin(filling, unit)
    return filled


def sends(plan: RecoveryPlan, layout: Layout, there: ReachableMemory) -> list[MPI.Request]:
    """Begin to send what other ranks need of this one's memory. The messages keep what they are made of."""
    requests: list[MPI.Request] = []
    for filling in plan.fillings:
        for transfer in filling.transfers:
            if transfer.sent and transfer.holder == layout.rank:
                part, holding = transfer.part, _holding(plan, transfer)
                for array in there.arrays_of(part.owner, part.unit, part.before):
                    cut = array[transfer.start - holding.start : transfer.stop - holding.start]
                    requests += [send(layout.world, data, filling.server, TAG) for data in _messages(cut)]
    return requests


class Filled:
    """The new units of one server, while they are being filled."""

    def __init__(self, plan: RecoveryPlan, layout: Layout, made: Made, there: ReachableMemory) -> None:
        self._plan, self._comm, self._there = plan, layout.world, there
        self._units, self.where = made
        self.requests: list[MPI.Request] = []
        """Messages under way; `finish` may be called when they have ended."""
        self._left: list[tuple[UnitPlan, Unit, list[list[Array]]]] = []

    def begin(self, filling: UnitPlan, unit: Unit) -> None:
        """Copy what is here, and begin to receive what is not."""
        if not filling.adopted:
            self._left.append((filling, unit, [self._take(unit, transfer) for transfer in filling.transfers]))

    def _take(self, unit: Unit, transfer: Transfer) -> list[Array]:
        """Values go to the unit; the arrays of state, for later, or none where there is no state."""
        holding, part = _holding(self._plan, transfer), transfer.part
        values = unit.stored[transfer.start - unit.start : transfer.stop - unit.start]
        if not transfer.sent:
            first, last = transfer.start - holding.start, transfer.stop - holding.start
            there, *state = self._there.arrays_of(part.owner, part.unit, part.before)
            values[...] = there[first:last]
            return [array[first:last] for array in state]
        names = [] if _step(holding, transfer) is None else holding.states
        state = [np.empty(values.shape, dtype_of(name)) for name in names]
        for array in (values, *state):
            self.requests += [self._comm.Irecv(data, transfer.holder, TAG) for data in _messages(array)]
        return state

    def finish(self) -> list[Unit]:
        """All messages are there: the units, which stand at their rounds."""
        for filling, unit, states in self._left:
            steps = [_step(_holding(self._plan, transfer), transfer) for transfer in filling.transfers]
            state, step = self._state(unit, filling.transfers, states, steps)
            unit.stands(filling.round, filling.pushes, state, step, filling.torn)
        return self._units

    def _state(
        self, unit: Unit, transfers: Sequence[Transfer], states: Sequence[list[Array]], steps: Sequence[int | None]
    ) -> tuple[list[Array] | None, int]:
        """The optimizer's state, put together, and its step. What has none yet begins with one where others have it."""
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


def _adopt(filling: UnitPlan, old: Unit, unit: Unit) -> None:
    """The new unit has the old one's arrays: it stands where the old one does, or is put back to."""
    if filling.transfers[0].part.before:
        assert isinstance(old, SurvivingUnit)
        old.undo.back()
        old.goes_back_to(old.undo.standings()[0][1])
        old.round = filling.round
    fits = _slots(unit) == len(old.state or ())
    state, step = (old.state, old.step) if fits else (None, 0)
    unit.stands(filling.round, filling.pushes, state, step, filling.torn)


def _slots(unit: Unit) -> int:
    return 0 if unit.optimizer is None else len(initial(unit.optimizer, unit.stored[:0]))


def _holding(plan: RecoveryPlan, transfer: Transfer) -> Holding:
    return plan.holdings[transfer.part.owner][transfer.part.unit]


def _step(holding: Holding, transfer: Transfer) -> int | None:
    return holding.standings[int(transfer.part.before)][1]


def _messages(array: Array) -> Iterator[NDArray[np.uint8]]:
    """Views of an array's bytes, each of which fits a message."""
    data = array.view(np.uint8)
    return (data[at : at + MESSAGE_BYTES] for at in range(0, data.size, MESSAGE_BYTES))
