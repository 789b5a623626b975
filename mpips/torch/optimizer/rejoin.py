"""Steps of a DistributedOptimizer that go on after a death: the store recovers, and what is not complete is made again.

In a synchronous store a step that has ended on one worker is never undone. So after a recovery the store stands either
where this worker's step began, and the same gradients are pushed again, or where the step ends. In an asynchronous
store gradients are not pushed a second time, because the first push may count already.

All workers make the same steps, and the same collective calls between two steps, such as `save`. When a process dies
during such a call, it may be over for one worker and not for another. `meet` decides which calls count as made, and
where a new worker goes on.
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
    """The steps of one worker, repeated after deaths.

    If the store does not survive deaths, StoreErrors go to the caller.
    """

    def __init__(self, store: KVStore, names: Sequence[Name], exchange: GradientExchange, consensus: Consensus) -> None:
        self._store = store
        self._names = names
        self._exchange = exchange
        self._consensus = consensus
        # the agreement of the step under way: after a death the step ends by it
        self._agreed: AgreedStep | None = None
        # True while this worker has taken a dead one's place and has made no step
        self.new = store.layout.survives and store.worker.fresh
        # steps that have been made
        self.steps = 0 if self.new else store.resumed or 0
        # collective calls that this worker has begun since the last step
        self._calls = 0
        # how many of them are over for some worker, and so are not made again
        self._done = 0
        # True if the workers have to meet, after a recovery
        self._unmet = self.new
        # True while this worker is new and has received nothing from the others
        self._lacks = self.new
        # True if the others made this worker's next step before it came, so that it has the result already
        self._has_made = False

    def begin(self) -> None:
        """Take the common parameters.

        A new worker meets the others first, which have begun long ago. Collective, blocking.
        """

        def begun() -> None:
            self._see_others(False)
            self._exchange.begin(self.new)

        self._through(begun)
        self._consensus.note()

    def step(self, brought: Brought) -> bool:
        """Make one step. Blocking. Return True if it was skipped, because a gradient has overflowed on some worker."""
        self.new = False
        # The others have made this step already, and their result came with the meeting.
        if self._has_made:
            self._has_made = False
            self.steps += 1
            return brought.overflow
        goal = self._round() + 1

        def exchange() -> None:
            # True only after a death: the step's push counts already (in an asynchronous store it may count), so it is
            # not repeated, and only the result is taken.
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
        # If the store has recovered and only the result was taken, the workers have not met since.
        self._through(lambda: self._see_others(False))
        return self._agreed.skipped

    def call(self, what: str, call: Callable[[], T]) -> T | None:
        """Make a collective call between two steps, one of `consensus.CALLS`. Blocking.

        Return None if the others are done with it.
        """
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
        """Wait until the others have ended their last step.

        Blocking. If they have closed the store already, return at once.
        """
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
        """Return the round at which the store stands. Within a step it is the one that this worker has begun."""
        return self._store.worker.keys[self._names[0]].round

    def _through(self, call: Callable[[], T]) -> T:
        """Call `call`, again after each death, until it returns."""
        while True:
            try:
                return call()
            except StoreError as error:
                self._recover(error)

    def _recover(self, error: StoreError) -> None:
        """Begin the next generation.

        Raise `error` if no process has died, or if what is left of the store is not whole.
        """
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
        """Meet the other workers, once after each recovery.

        Collective then, blocking. `pushes`: this worker is in a step.
        """
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
    """Where one worker is in its program."""

    # steps that it has made
    steps: int
    # collective calls that it has begun since the last step
    calls: int
    # True if it is inside of the next step
    pushes: bool
    # True if it has just taken a dead worker's place, and has received nothing
    new: bool


class Meeting(NamedTuple):
    """What follows from the positions of all workers."""

    # the lowest rank that is not new; new workers take what they need from it
    giver: int
    # the step at which new workers go on
    resumed: int
    # True if the others have made that step already, so that a new worker begins with its result
    has_made: bool
    # calls since the last step that are over for some worker, and so are not made again
    done: int
    # why the workers cannot go on, or ""
    refusal: str


def meet(positions: Sequence[StepPosition], synchronous: bool) -> Meeting:
    """Decide where the workers go on after a death. Pure.

    In a synchronous store all workers that are not new have made the same number of steps, or one is about to end a
    step that another has ended. New workers get one step less than these, with its result, unless a step is under way:
    so after that step they make the same collective calls as the others.
    """
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
