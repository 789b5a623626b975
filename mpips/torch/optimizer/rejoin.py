"""Steps of a DistributedOptimizer that survive deaths: the store recovers, and unfinished steps are repeated.

In a synchronous store a step that has ended on any worker is never undone. So after a recovery the store is either at
the round where this worker's step began, and the same gradients are pushed again, or at the round where the step ends.
In an asynchronous store gradients are not pushed a second time, because the first push may count already.

All workers make the same steps, and the same collective calls between two steps, such as `save`. When a process dies
during such a call, the call may be over for one worker and not for another. `meet` decides which calls count as made,
and at which step a new worker continues.
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
        # what the workers have agreed on for the current step; still valid after a death
        self._agreed: AgreedStep | None = None
        # True while this worker, which has replaced a dead one, has made no step
        self.new = store.layout.survives and store.worker.fresh
        # steps that have been made
        self.steps = 0 if self.new else store.resumed or 0
        # collective calls that this worker has begun since the last step
        self._calls = 0
        # number of these calls that some worker has finished, so that they are not made again
        self._done = 0
        # True if this worker has yet to exchange positions with the others (`meet`), after a recovery
        self._unmet = self.new
        # True while this worker is new and has received nothing from the others
        self._lacks = self.new
        # True if the others made this worker's next step before it joined, so that it already has the result
        self._has_made = False

    def begin(self) -> None:
        """Take the common parameters. Collective, blocking.

        A new worker first exchanges positions with the others, which have been training for a while.
        """

        def begun() -> None:
            self._see_others(False)
            self._exchange.begin(self.new)

        self._through(begun)
        self._consensus.note()

    def step(self, brought: Brought) -> bool:
        """Make one step. Blocking. Return True if it was skipped, because a gradient has overflowed on some worker."""
        self.new = False
        # The others have made this step already, and this worker received the result when it joined.
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
        log.rank_state.step = self.steps
        self._calls = self._done = 0
        # If the store has recovered and only the result was taken, the workers have not exchanged positions yet.
        self._through(lambda: self._see_others(False))
        return self._agreed.skipped

    def call(self, what: str, call: Callable[[], T]) -> T | None:
        """Make a collective call between two steps, one of `consensus.CALLS`. Blocking.

        Return None, without making the call, if another worker has finished it already.
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
        """Wait until the other workers have finished their last step. Blocking.

        If they have closed the store already, return at once.
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
        """Return the store's current round. During a step this is the round that this worker has begun."""
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

        Raise `error` if no process has died. Raise an error, too, if a part of the store is lost.
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
        """Exchange positions with the other workers, once after each recovery. Collective and blocking if that is due.

        `pushes` is True if this worker is in a step.
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
    # True if it has just replaced a dead worker, and has received nothing from the others
    new: bool


class Meeting(NamedTuple):
    """What follows from the positions of all workers."""

    # the lowest rank that is not new; new workers take what they need from it
    giver: int
    # the step at which new workers continue
    resumed: int
    # True if the others have made that step already, so that a new worker begins with its result
    has_made: bool
    # number of calls since the last step that some worker has finished, so that they are not made again
    done: int
    # why the workers cannot go on, or ""
    refusal: str


def meet(positions: Sequence[StepPosition], synchronous: bool) -> Meeting:
    """Decide at which step the workers continue after a death. Pure.

    In a synchronous store all workers that are not new have made the same number of steps, or one is about to end a
    step that another has ended. If no step is under way, new workers start one step earlier, already with the result of
    that step. So they then make the same collective calls between two steps as the others.
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
