"""An interrupt may come anywhere in a call of the engine: what ends then ends, and the engine works on."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import random
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

from mpips.store.runtime.engine import Alone, Engine
from mpips.store.runtime.tasks import Task

INTERRUPTS = 4000
LONGEST = 3e-4  # seconds after which an interrupt comes at the latest


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGALRM is heard as Ctrl-C is; a test that hangs ends with the places where all threads are."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    faulthandler.dump_traceback_later(120, exit=True)
    gc.disable()  # what is raised while it collects is lost
    yield
    gc.enable()
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def steps(count: int) -> Task[int]:
    for _ in range(count):
        yield True
    return count


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.usefixtures("interrupts")
def test_an_engine_works_after_an_interrupt_anywhere(background: bool) -> None:
    engine, draw = Engine(Alone(30, 30), background), random.Random(1)
    came = 0
    for _ in range(INTERRUPTS):
        with contextlib.suppress(KeyboardInterrupt):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, LONGEST))
                for _ in range(5):
                    handles = [engine.submit(["a"], steps(3), 0, "one"), engine.push(steps(2).__next__, ["b"])]
                    for handle in handles:
                        handle.test()
                        handle.wait()
            except KeyboardInterrupt:
                came += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        engine.forget()
        assert engine.submit(["a"], steps(5), 0, "after it").wait() == 5
    assert came > INTERRUPTS / 4
    engine.close()
