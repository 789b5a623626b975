"""Steps of a DistributedOptimizer that go on after a death: the store recovers, and what is not complete is made again.

In a synchronous store a step that has ended on one worker is never undone. So after a recovery the store stands either
where this worker's step began, and the same gradients are pushed again, or where it ends. In an asynchronous one they
are not pushed again, as they may count already.

All workers make the same steps, and the same collective calls between two steps, such as `save`. One worker may be done
with a call in which a death finds another. `meet` says where a new worker goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec

from mpips.collectives import log
from mpips.store.api import KVStore
from mpips.store.keys.key import Name
from mpips.store.runtime.errors import StoreError
from mpips.torch.optimizer.consensus import Brought, Consensus
from mpips.torch.optimizer.exchange import AgreedStep, GradientExchange

T = TypeVar("T")


class SurvivingSteps:
    """Makes the steps of one worker. Where the store does not survive deaths, StoreErrors go to the caller."""

    def __init__(self, store: KVStore, names: Sequence[Name], exchange: GradientExchange, consensus: Consensus) -> None:
        self._store, self._names, self._exchange, self._consensus = store, names, exchange, consensus
        self._agreed: AgreedStep | None = None
        self.new = store.layout.survives and store.worker.fresh
        """True where this worker has taken a dead one's place, and has made no step yet."""
        self.steps = 0 if self.new else store.resumed or 0
        """Steps that have been made."""
        self._calls, self._done = 0, 0
        self._unmet, self._lacks, self._has_made = self.new, self.new, False

    def begin(self) -> None:
        """Begin as the others do; where they have begun already, meet them at first. Collective then, blocking."""

        def begun() -> None:
            self._see_others(False)
            self._exchange.begin(self.new)

        self._through(begun)
        self._consensus.note()

    def step(self, brought: Brought) -> bool:
        """Make one step; return whether it is skipped, as a gradient has overflowed on some worker. Blocking."""
        self.new = False
        if self._has_made:
            self._has_made = False
            self.steps += 1
            return brought.overflow
        goal = self._round() + 1

        def exchange() -> None:
            if self._exchange.sent if self._store.layout.asynchronous else self._round() >= goal:
                self._exchange.take()
                return
            self._see_others(True)
            self._agreed = self._consensus.agree(self.steps, brought)
            self._exchange.push(self._agreed)

        self._through(exchange)
        assert self._agreed is not None
        self._exchange.end(self._agreed)
        self._consensus.note()
        self.steps += 1
        log.place.step = self.steps
        self._calls = self._done = 0
        self._through(lambda: self._see_others(False))
        return self._agreed.skipped

    def call(self, what: str, call: Callable[[], T]) -> T | None:
        """Make a collective call between steps, one of `consensus.CALLS`; return None where the others are done with
        it. Blocking."""
        self._calls += 1
        number = self._calls

        def made() -> T | None:
            self._see_others(False)
            if number <= self._done:
                return None
            self._consensus.see_call(what, self.steps)
            return call()

        made_of_it = self._through(made)
        self._consensus.note()
        return made_of_it

    def end(self) -> None:
        """Wait for the others to end their last step. Blocking; where they have ended already, they need nobody."""
        self._calls += 1
        number = self._calls

        def ended() -> None:
            self._see_others(False)
            if number > self._done:
                self._store.barrier()

        with suppress(StoreError):
            self._through(ended)

    # ---- inside

    def _round(self) -> int:
        """Return the round that the store stands at; in a step, the one that this worker has begun."""
        return self._store.worker.keys[self._names[0]].round

    def _through(self, call: Callable[[], T]) -> T:
        """Return what `call` returns, which is called again after each death."""
        while True:
            try:
                return call()
            except StoreError as error:
                self._recover(error)

    def _recover(self, error: StoreError) -> None:
        """Begin the next generation; raise `error` where nobody has died, or what is left does not suffice."""
        store = self._store
        if not store.layout.survives:
            raise error
        rounds = store.recover()
        if not store.layout.lost:
            raise error
        torn = [name for name in self._names if name in rounds.torn or name not in rounds]
        apart = not store.layout.asynchronous and len({rounds.get(name) for name in self._names}) > 1
        if torn or apart:
            what = f"key {torn[0]!r} is" if torn else "keys are"
            raise StoreError(f"recover: {what} not whole after a death: load a checkpoint") from error
        self._exchange.renew()
        self._unmet = True

    def _see_others(self, pushes: bool) -> None:
        """Meet the other workers, once after each recovery. Collective then, blocking."""
        if not self._unmet:
            return
        worker = self._store.worker
        mine = StepPosition(self.steps, self._calls, pushes, self._lacks)
        told = worker.agree("rejoin", data=msgspec.msgpack.encode(mine))
        positions = [msgspec.msgpack.decode(word, type=StepPosition) for word in told]
        met = meet(positions, not self._store.layout.asynchronous)
        if met.refusal:
            raise RuntimeError(f"DistributedOptimizer: {met.refusal}")
        if any(position.new for position in positions):
            self._exchange.give(met.giver, self._lacks)
        if self._lacks:
            self.steps, self._has_made = met.resumed, met.has_made
        self._done = met.done
        self._unmet = self._lacks = False


class StepPosition(msgspec.Struct, array_like=True, frozen=True):
    """The place of one worker in its program."""

    steps: int
    """Steps that it has made."""
    calls: int
    """Collective calls that it has begun since."""
    pushes: bool
    """True where it is in the next step."""
    new: bool
    """True where it has just taken a dead worker's place, and has nothing yet."""


class Meeting(NamedTuple):
    """The outcome of all workers' positions."""

    giver: int
    """The lowest worker that is not new: new ones take what they need from it."""
    resumed: int
    """The step at which new workers go on."""
    has_made: bool
    """True where the others have made that step already: what came of it is what a new worker begins with."""
    done: int
    """Calls since the last step that are over, though perhaps not on all workers."""
    refusal: str
    """The reason why they cannot go on; "" where they can."""


def meet(positions: Sequence[StepPosition], synchronous: bool) -> Meeting:
    """Return where workers go on after a death. In a synchronous store all have made equally many steps."""
    there = [position for position in positions if not position.new]
    giver = next((rank for rank, position in enumerate(positions) if not position.new), -1)
    if not there:
        return Meeting(
            giver,
            0,
            False,
            0,
            "no worker is left that has the parameters and the optimizer's state: begin again, from a checkpoint",
        )
    steps, calls = min(position.steps for position in there), max(position.calls for position in there)
    if not synchronous:
        return Meeting(giver, max(steps - 1, 0), False, 0, "")
    if any(position.pushes for position in there):
        return Meeting(giver, steps, False, calls, "")
    if not steps:
        early = "a worker has died before the first step, in a call that a new worker does not make: begin again"
        return Meeting(giver, 0, False, max(calls - 1, 0), early if calls and len(there) < len(positions) else "")
    return Meeting(giver, steps - 1, True, max(calls - 1, 0), "")
