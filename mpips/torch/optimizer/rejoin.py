"""Steps of a DistributedOptimizer that survive deaths of processes, and the positions that workers exchange after one.

A step that has ended on any worker of a synchronous store is never undone. So there are two cases after a recovery. If
the store has not completed the update of this worker's step, the worker pushes the same gradients again. If the store
has completed it, the worker only takes the result. In an asynchronous store gradients are never pushed a second time,
because the store may have applied the first push already.

All workers make the same steps, and the same collective calls between two steps, such as `save`. When a process dies
during such a call, the call may be over on one worker and not on another. So after a recovery the workers exchange
their positions. From these, `meet` decides which calls are not made again, and at which step a new worker continues. A
new worker is one that has replaced a dead worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import msgspec

from mpips.collectives import log
from mpips.store.api import KVStore
from mpips.store.keys.key import Name
from mpips.store.runtime.errors import LostError, StoreError
from mpips.torch.optimizer.consensus import Brought, Consensus
from mpips.torch.optimizer.exchange import AgreedStep, GradientExchange
from mpips.training.recovery import Recovery

T = TypeVar("T")


class SurvivingSteps:
    """Makes the optimizer's steps on one worker, and repeats a call that the death of another worker has interrupted.

    A *position* tells where a worker is in its program: the number of steps that it has made, and the number of other
    collective calls since the last step (`StepPosition`). After a death this happens:

    1. The call that was interrupted, for example `step`, lets the store recover. If a spare process is left, it becomes
       a new worker in place of the dead one.
    2. The call is made again. As a rule it begins with an exchange of positions, in which all workers take part
       (`_meet_if_due`). There a new worker receives the number of its first step, and from another worker the
       parameters and the optimizer's state as far as the store does not keep them.
    3. There is one exception. If the store has already applied the push of the interrupted step, `step` first takes the
       updated parameters and ends the step. It exchanges positions only afterwards. So a new worker receives parameters
       and state as they are after that step, and not a mixture of before and after.
    """

    def __init__(self, store: KVStore, names: Sequence[Name], exchange: GradientExchange, consensus: Consensus) -> None:
        self._store = store
        self._names = names
        self._exchange = exchange
        self._consensus = consensus
        self._recovery = Recovery(store, names, self._note_recovery)
        # The result of the workers' comparison for the current step. It is kept in a recovery, because a step whose
        # update the servers have completed is ended without another comparison.
        self._agreed: AgreedStep | None = None
        # True if this worker has replaced a dead worker and has not begun a step yet
        self.new = store.worker.fresh
        # number of steps that have been made
        self.steps = 0 if self.new else store.resumed or 0
        # number of collective calls other than steps that this worker has begun since the last step
        self._calls = 0
        # number of collective calls since the last step that some worker has finished, so they are not made again
        self._calls_done = 0
        # True from a recovery until this worker has exchanged positions with the other workers
        self._meeting_due = self.new
        # True while this worker is new and has received no parameters and state from another worker
        self._has_nothing = self.new
        # True if the other workers made this worker's next step before the worker joined. The worker then already has
        # the step's result, and its next call of `step` only counts the step.
        self._has_made = False

    def begin(self) -> None:
        """Take the parameters that all workers have in common. Collective, blocking.

        A new worker first exchanges positions with the other workers, which have been training for a while.
        """

        def take() -> None:
            self._meet_if_due(False)
            self._exchange.begin(self.new)

        self._recovery.run(take)
        self._consensus.note()

    def step(self, brought: Brought) -> bool:
        """Make one step. Blocking. Return True if it was skipped, because a gradient has overflowed on some worker."""
        self.new = False
        # The other workers have made this step already, and this worker received the result when it joined.
        if self._has_made:
            self._has_made = False
            self.steps += 1
            return brought.overflow
        goal = self._round() + 1

        def exchange() -> None:
            # The condition can be true only when `exchange` runs again after a death. The store has applied the step's
            # push already (an asynchronous store may have), so do not repeat the push, and only take the result.
            if self._exchange.sent if self._store.layout.asynchronous else self._round() >= goal:
                self._exchange.take()
                return
            self._meet_if_due(True)
            self._agreed = self._consensus.agree(self.steps, brought)
            self._exchange.push(self._agreed)

        self._recovery.run(exchange)
        assert self._agreed is not None
        self._exchange.end(self._agreed)
        self._consensus.note()
        self.steps += 1
        log.rank_state.step = self.steps
        self._calls = self._calls_done = 0
        # If this worker only took the result after a recovery, it has not exchanged positions yet.
        self._recovery.run(lambda: self._meet_if_due(False))
        return self._agreed.skipped

    def call(self, what: str, call: Callable[[], T]) -> T | None:
        """Make `call`, a collective call between two steps, and return its result. Blocking.

        If a process dies during the call, the store recovers and the call is made again. If another worker had already
        finished the call before the death, it is not made again, and the result is None.

        `what` is the call's name, one of `consensus.CALLS`.
        """
        self._calls += 1
        number = self._calls

        def call_unless_done() -> T | None:
            self._meet_if_due(False)
            if number <= self._calls_done:
                return None
            self._consensus.check_call(what, self.steps)
            return call()

        result = self._recovery.run(call_unless_done)
        self._consensus.note()
        return result

    def end(self) -> None:
        """Wait until the other workers have finished their last step. Blocking.

        If the other workers have closed the store already, return at once.
        """
        self._calls += 1
        number = self._calls

        def wait() -> None:
            self._meet_if_due(False)
            if number > self._calls_done:
                self._store.barrier()

        with suppress(StoreError):
            self._recovery.run(wait)

    # ---- inside

    def _round(self) -> int:
        """Return the round of the store's keys: the number of pushes to each key, including one that has only begun."""
        return self._store.worker.keys[self._names[0]].round

    def _note_recovery(self) -> None:
        """Continue with the store as it is after a recovery, and note that positions have to be exchanged.

        The positions are exchanged later, in `_meet_if_due`.

        Raises LostError if the store has applied the update of the interrupted step to some keys and not to others.
        """
        store = self._store
        if not store.layout.asynchronous and len({store.worker.keys[name].round for name in self._names}) > 1:
            raise LostError("recover: keys are not whole after a death: load a checkpoint")
        self._exchange.renew()
        self._meeting_due = True

    def _meet_if_due(self, pushes: bool) -> None:
        """Exchange positions with the other workers if that has not happened since the last recovery.

        In that case the call is collective and blocking. Otherwise it does nothing. New workers also receive the
        parameters and the optimizer's state from another worker, as far as the store does not keep them. `pushes` is
        True if this worker is inside of a step and will push in it.

        Raises RuntimeError on all workers if the positions show that they cannot continue.
        """
        if not self._meeting_due:
            return
        worker = self._store.worker
        own = StepPosition(self.steps, self._calls, pushes, self._has_nothing)
        encoded = worker.agree("rejoin", data=msgspec.msgpack.encode(own))
        positions = [msgspec.msgpack.decode(data, type=StepPosition) for data in encoded]
        met = meet(positions, not self._store.layout.asynchronous)
        if met.refusal:
            raise RuntimeError(f"DistributedOptimizer: {met.refusal}")
        if any(position.new for position in positions):
            self._exchange.give(met.giver, self._has_nothing)
        if self._has_nothing:
            self.steps, self._has_made = met.resumed, met.has_made
        self._calls_done = met.done
        self._meeting_due = self._has_nothing = False


class StepPosition(msgspec.Struct, array_like=True, frozen=True):
    """The position of one worker in its program."""

    # number of steps that the worker has made
    steps: int
    # number of collective calls other than steps that the worker has begun since the last step
    calls: int
    # True if the worker has begun the next step, and will push in it
    pushes: bool
    # True if the worker has just replaced a dead worker, and has received no parameters from another worker yet
    new: bool


class Meeting(NamedTuple):
    """The decision that follows from the positions of all workers."""

    # the lowest rank that is not new; new workers receive parameters and state from this rank
    giver: int
    # the step at which new workers continue
    resumed: int
    # True if the other workers have made the step `resumed` already, so that a new worker begins with its result
    has_made: bool
    # number of calls since the last step that some worker has finished, so that they are not made again
    done: int
    # the reason why the workers cannot continue, or ""
    refusal: str


def meet(positions: Sequence[StepPosition], synchronous: bool) -> Meeting:
    """Decide from the positions of all workers, by rank, where they continue after a death. Pure.

    In a synchronous store, the workers that are not new have made the same number of steps, except that one worker may
    be about to end a step that another worker has ended.

    If no step is under way, new workers begin one step behind the other workers, although they receive the result of
    that step, too. Their first call of `step` then only counts the step. The reason is that the program of a new worker
    begins with a call of `step`. Afterwards it makes the same collective calls as the other workers.
    """
    known = [position for position in positions if not position.new]
    giver = next((rank for rank, position in enumerate(positions) if not position.new), -1)
    if not known:
        return Meeting(
            giver,
            0,
            False,
            0,
            "no worker is left that has the parameters and the optimizer's state: begin again, from a checkpoint",
        )
    steps, calls = min(position.steps for position in known), max(position.calls for position in known)
    if not synchronous:
        return Meeting(giver, max(steps - 1, 0), False, 0, "")
    if any(position.pushes for position in known):
        return Meeting(giver, steps, False, calls, "")
    if not steps:
        early = "a worker has died before the first step, in a call that a new worker does not make: begin again"
        return Meeting(giver, 0, False, max(calls - 1, 0), early if calls and len(known) < len(positions) else "")
    return Meeting(giver, steps - 1, True, max(calls - 1, 0), "")
