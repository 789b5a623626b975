"""The loop of all waits: it polls, yields the core, sleeps, checks whether the generation has ended, warns, times out.

Short waits never reach this loop, because callers first poll a few times themselves. `drive` runs an operation step by
step, and now and then asks a `RankGroup` whether the ranks for which the operation waits can still arrive.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from mpips.collectives.clock import Clock
from mpips.collectives.errors import StallError, have_not, warn
from mpips.collectives.recorder import own as recorder

# the number of steps that the loop runs before it first yields the core
SPINS = 16
# The time between two calls of `RankGroup.look`, or LOOK_NAPS sleeps if these take longer. The interval is a time and
# not a number of yields, because on a busy core each yield may take a whole time slice.
LOOK_SECONDS = 1e-4
LOOK_NAPS = 16
# A sleep between two steps takes NAP_SHARE of the time waited so far, within these bounds.
NAP_SECONDS = (1e-4, 3e-4)
NAP_SHARE = 0.02
# After waiting this long, a rank sleeps between steps instead of only yielding its core.
NAP_AFTER_ON_NODE, NAP_AFTER_BETWEEN_NODES = 2e-2, 2e-3


LONGER = "for longer waits raise the timeout (timeout_seconds, MPIPS_TIMEOUT_SECONDS, or timeout= of a PyTorch group)"


class Limits(NamedTuple):
    """The time after which a wait warns, and the time after which it raises StallError (0: never).

    Time while the process was stopped does not count (`Clock`).
    """

    stall_seconds: float = 60.0
    timeout_seconds: float = 300.0


class RankGroup(Protocol):
    """What a waiting rank asks about the ranks of its generation: which are late, and whether it must stop waiting.

    A generation ends when one of its ranks fails.
    """

    limits: Limits
    # the seconds after which a waiting rank sleeps between two steps, instead of only yielding its core
    nap_after: float

    def look(self, waited: float) -> None:
        """Raise if the generation has ended, or if a rank for which this one waits can no longer arrive.

        `waited`: seconds since the wait began.
        """

    def late(self) -> Sequence[int]:
        """Return the ranks that have not arrived yet, as far as this rank knows."""


def read_limits() -> Limits:
    """Read MPIPS_STALL_SECONDS and MPIPS_TIMEOUT_SECONDS. Raise ValueError if one is not a number."""
    usual = Limits()
    return Limits(
        _seconds("MPIPS_STALL_SECONDS", usual.stall_seconds), _seconds("MPIPS_TIMEOUT_SECONDS", usual.timeout_seconds)
    )


def _seconds(name: str, usual: float) -> float:
    text = os.environ.get(name, str(usual))
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}: set a number of seconds") from None


def drive(steps: Iterator[None], generation: RankGroup, what: str, spins: int = SPINS) -> None:
    """Run the steps of an operation to their end. Blocking.

    Raises StallError after the time limit of the generation. Errors of the steps and of `generation` are passed on.

    Args:
        steps: The operation. It yields whenever it has to wait.
        generation: The ranks of the operation.
        what: The operation in words, for warnings and errors.
        spins: The number of steps before the first yield of the core.
    """
    start = due = nap = written = 0.0
    warned = False
    try:
        for turn, _ in enumerate(steps, 1):
            if turn <= spins:
                continue
            if nap:
                time.sleep(nap)
            else:
                os.sched_yield()
            now = time.monotonic()
            if not due:
                clock, start, due = Clock(), now, now + LOOK_SECONDS
            elif now >= due:
                waited = clock.seconds()
                generation.look(waited)
                if waited > generation.nap_after:
                    nap = min(max(NAP_SHARE * waited, NAP_SECONDS[0]), NAP_SECONDS[1])
                due = now + max(LOOK_SECONDS, LOOK_NAPS * nap)
                if waited > recorder.LASTING_SECONDS < now - written:
                    written = now
                    recorder.write_wait(what, start, generation.late())
                if waited > generation.limits.stall_seconds and not warned:
                    warned = True
                    warn(late_sentence(what, waited, generation.late()))
                check_in_time(what, waited, generation)
    finally:
        # Count only waits longer than LOOK_SECONDS. Counting a shorter wait is not worth the time.
        if due > start + LOOK_SECONDS:
            recorder.count_wait(time.monotonic() - start, bool(written))


def wait_until(ready: Callable[[], object]) -> Iterator[None]:
    """Yield until `ready()` is true."""
    while not ready():
        yield


def check_in_time(what: str, waited: float, generation: RankGroup) -> None:
    """Raise StallError if a wait has lasted longer than the generation permits."""
    if 0 < generation.limits.timeout_seconds < waited:
        sentence = late_sentence(what, generation.limits.timeout_seconds, generation.late())
        raise StallError(f"{sentence}; {LONGER}")


def late_sentence(what: str, waited: float, late: Sequence[int], step: str = "come") -> str:
    """Return the sentence "`what` has waited for `waited` s", with the ranks that have not taken the `step`."""
    missing = f": {have_not(late, step)}" if late else ""
    return f"{what} has waited for {waited:.3g} s{missing}"
