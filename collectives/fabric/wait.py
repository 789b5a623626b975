"""The one wait loop: look, give way, nap, look for the end of the generation, warn, time out.

A wait that is short never comes here: who waits looks a few times by itself. `drive` runs what is to be waited for as
steps, and asks a `Generation` now and then whether there is still anybody to wait for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from mpips.collectives.clock import Clock
from mpips.collectives.errors import StallError, ranks, warn
from mpips.collectives.recorder import own as recorder

SPINS = 16  # steps before the first yield
LOOK_SECONDS = 1e-4  # between two looks around; yields are not counted, as each may cost a slice of a busy core
LOOK_NAPS = 16  # and at least so many naps
NAP_SECONDS = (1e-4, 3e-4)  # the shortest and the longest sleep between two steps, in between a share of the wait
NAP_SHARE = 0.02
NAP_AFTER_ON_NODE, NAP_AFTER_BETWEEN_NODES = 2e-2, 2e-3  # seconds of waiting after which a rank sleeps between steps


LONGER = "for longer waits raise the timeout (timeout_seconds, MPIPS_TIMEOUT_SECONDS, or timeout= of a PyTorch group)"


class Limits(NamedTuple):
    """Seconds after which a wait warns, and raises StallError (0: never). Time in which the process was stopped does
    not count (`Clock`)."""

    stall_seconds: float = 60.0
    timeout_seconds: float = 300.0


class Generation(Protocol):
    """The questions that a waiting rank asks while it waits."""

    limits: Limits
    nap_after: float

    def look(self, waited: float) -> None:
        """Raise where the generation has ended, or a rank that is waited for comes no more."""

    def late(self) -> Sequence[int]:
        """The ranks that are waited for, as far as that is known."""


def limits() -> Limits:
    """From MPIPS_STALL_SECONDS and MPIPS_TIMEOUT_SECONDS. ValueError where these are no numbers."""
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


def drive(steps: Iterator[None], generation: Generation, what: str, spins: int = SPINS) -> None:
    """Run the steps of `what` to their end. Between steps there is something to wait for. StallError after the limit;
    else what the steps, or the generation, raise."""
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
                    recorder.waits(what, start, generation.late())
                if waited > generation.limits.stall_seconds and not warned:
                    warned = True
                    warn(_sentence(what, waited, generation))
                see_in_time(what, waited, generation)
    finally:
        if due > start + LOOK_SECONDS:  # it has looked around: shorter waits do not count
            recorder.waited(time.monotonic() - start, bool(written))


def until(ready: Callable[[], object]) -> Iterator[None]:
    """Steps that end when it is so."""
    while not ready():
        yield


def see_in_time(what: str, waited: float, generation: Generation) -> None:
    """StallError where that is longer than a wait may last."""
    if 0 < generation.limits.timeout_seconds < waited:
        raise StallError(f"{_sentence(what, generation.limits.timeout_seconds, generation)}; {LONGER}")


def _sentence(what: str, waited: float, generation: Generation) -> str:
    late = list(generation.late())
    missing = f": {ranks(late)} {'have' if len(late) > 1 else 'has'} not come" if late else ""
    return f"{what} has waited for {waited:.3g} s{missing}"
