"""The engine without MPI: order, results, errors, interrupts, who does the work, and that waiting costs little."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import random
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import clock as clocks
from collectives.fabric import wait
from collectives.fabric.tasks import Task
from collectives.fabric.wait import Limits
from mpips import StoreError
from mpips.store.runtime.engine import Engine, Handle, Turns

OPERATIONS = st.lists(st.tuples(st.lists(st.sampled_from("abcd"), max_size=2), st.integers(-2, 2)), max_size=12)
INTERRUPTS = 4000
LONGEST = 3e-4  # seconds after which an interrupt comes at the latest


class FakeGeneration:
    """It ends when it is told to (`over`), or by an operation that fails."""

    def __init__(self, stall_seconds: float = 30.0, timeout_seconds: float = 30.0) -> None:
        self.limits = Limits(stall_seconds, timeout_seconds)
        self.over: StoreError | None = None

    def check(self) -> None:
        if self.over is not None:
            raise self.over

    def look(self, waited: float) -> None:
        self.check()

    def end(self, what: str, error: BaseException) -> BaseException:
        self.over = self.over or StoreError(f"{what}: {error}")
        return self.over if isinstance(error, StoreError) else error


def begin(background: bool = True, *limits: float) -> Engine:
    return Engine(FakeGeneration(*limits), background)  # type: ignore[arg-type]


@pytest.fixture(params=[True, False], ids=["background", "foreground"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = begin(request.param)
    yield engine
    engine.close()


@pytest.fixture
def background() -> Iterator[Engine]:
    engine = begin()
    yield engine
    engine.close()


def until(event: threading.Event, result: object = None) -> Task[Any]:
    while not event.is_set():
        yield
    return result


def note(seen: list[Any], value: object, event: threading.Event | None = None) -> Task[None]:
    yield
    if event is not None:
        yield from until(event)
    seen.append(value)


def fails(sentence: str) -> Task[None]:
    yield
    raise ValueError(sentence)


def steps(count: int) -> Task[int]:
    for _ in range(count):
        yield True
    return count


@given(OPERATIONS, st.randoms(use_true_random=False))
def test_only_the_first_on_all_its_names_is_ready(rows: list, random: random.Random) -> None:
    """Against the definition, while operations are added and removed in any order that is possible."""
    turns, alive = Turns(), list[tuple[Handle, int]]()
    coming = [(Handle(None, steps(0), dict.fromkeys(names), "", False), priority) for names, priority in rows]  # type: ignore[arg-type]
    place = {id(handle): number for number, (handle, _) in enumerate(coming)}
    while coming or alive:
        first = [
            (handle, priority)
            for at, (handle, priority) in enumerate(alive)
            if not any(set(handle.orders) & set(earlier.orders) for earlier, _ in alive[:at])
        ]
        expected = sorted(first, key=lambda each: (-each[1], place[id(each[0])]))
        assert turns.ready() == [handle for handle, _ in expected]
        assert list(turns.under_way.values()) == [handle for handle, _ in alive]
        if coming and (not alive or random.random() < 0.6):
            alive.append(coming.pop(0))
            turns.add(*alive[-1])
        else:
            ended = random.choice(first)
            turns.remove(ended[0])
            alive.remove(ended)


def test_operations_keep_their_order_on_a_name(engine: Engine) -> None:
    order: list[str] = []
    gate = threading.Event()
    engine.submit(["x"], note(order, "push", gate), 0, "push")
    engine.submit(["x"], note(order, "pull"), 10, "pull")
    engine.submit(["y"], note(order, "elsewhere"), 0, "elsewhere").wait()
    assert order == ["elsewhere"]
    gate.set()
    engine.run(["x"], note(order, "again"), 20, lambda: "again")
    assert order == ["elsewhere", "push", "pull", "again"]


@pytest.mark.parametrize("way", ["wait", "finish", "run"])
def test_an_error_is_raised_once(engine: Engine, way: str) -> None:
    calls = {
        "wait": lambda: engine.submit(["x"], fails("broken pipe"), 0, "push").wait(),
        "finish": lambda: (engine.submit(["x"], fails("broken pipe"), 0, "push"), engine.finish()),
        "run": lambda: engine.run(["x"], fails("broken pipe"), 0, lambda: "push"),
    }
    with pytest.raises(ValueError, match="broken pipe"):
        calls[way]()
    engine.finish()


def test_a_failure_ends_all_others(engine: Engine) -> None:
    ran: list[str] = []
    failing = engine.submit(["k"], fails("no route"), 0, "push of k")
    others = [engine.submit(["k"], note(ran, "after"), 5, "pull"), engine.submit("j", until(threading.Event()), 0, "j")]
    with pytest.raises(ValueError, match="no route"):
        failing.wait()
    for handle in others:
        with pytest.raises(StoreError, match="push of k: no route"):
            handle.wait()
    assert not ran
    engine.forget()
    engine.finish()


def test_a_wait_hears_that_the_generation_has_ended(engine: Engine) -> None:
    closed = threading.Event()

    def forever() -> Task[None]:
        try:
            while True:
                yield
        finally:
            closed.set()

    handle = engine.submit(["k"], forever(), 0, "pull of k")
    engine.generation.over = StoreError("rank 1 has left")
    with pytest.raises(StoreError, match="rank 1 has left"):
        handle.wait()
    assert closed.is_set()
    with pytest.raises(StoreError, match="rank 1 has left"):
        engine.run([], until(threading.Event()), 0, lambda: "push of k")


def test_finish_waits_for_detached_operations_when_asked(engine: Engine) -> None:
    gate = threading.Event()
    saving = engine.submit([], until(gate), 0, "save", detached=True)
    engine.submit([], steps(1), 0, "push").wait()
    engine.finish()
    assert not saving.done
    gate.set()
    engine.finish(detached=True)
    assert saving.done


@pytest.mark.slow
def test_waiting_in_the_background_is_cheap(background: Engine) -> None:
    """Looks cost about a twenty-fifth of the time; the test allows a noisy machine five times that, in one of three."""
    gate, shares = threading.Event(), []
    handle = background.submit(["x"], until(gate), 0, "pull")
    for _ in range(3):
        start, cpu = time.monotonic(), time.process_time()
        time.sleep(0.3)
        shares.append((time.process_time() - cpu) / (time.monotonic() - start))
    assert min(shares) < 0.2
    gate.set()
    handle.wait()


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.usefixtures("restless")
def test_an_error_that_was_seen_is_not_raised_again(background: Engine) -> None:
    """However soon its owner sees it: he may look while the communication thread is just ending the operation."""
    for _ in range(1500):
        handle = background.submit(["a"], fails("once"), 0, "push")
        while not handle.done:
            pass
        with pytest.raises(ValueError, match="once"):
            handle.wait()
        background.finish()
        background.generation.over = None


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_long_operation_stalls_only_where_nothing_goes_on(monkeypatch: pytest.MonkeyPatch, goes_on: bool) -> None:
    now, slept = [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: 0.0, sleep=slept.append)
    monkeypatch.setattr(wait, "time", clock)
    monkeypatch.setattr(clocks, "time", clock)

    def work(step: float) -> Task[None]:
        for look in range(1000):
            now[0] += step
            yield goes_on and look % 20 == 0

    engine = begin(False, 1, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run([], work(5e-5), 0, lambda: "work")
        assert bool(slept) == (not goes_on)
        engine.run([], work(5e-2), 0, lambda: "work")
    assert bool(caught) == (not goes_on)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """SIGALRM is heard as Ctrl-C is; a test that hangs ends with the places where all threads are."""

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    faulthandler.dump_traceback_later(120, exit=True)
    gc.disable()  # what is raised while it collects is lost
    yield
    gc.enable()
    faulthandler.cancel_dump_traceback_later()
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interrupts")
def test_it_works_after_an_interrupt_anywhere(engine: Engine) -> None:
    draw, came = random.Random(1), 0
    for _ in range(INTERRUPTS):
        with contextlib.suppress(KeyboardInterrupt, StoreError):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, LONGEST))
                for _ in range(5):
                    handles = [engine.submit(["a"], steps(3), 0, "one"), engine.submit("ab", steps(2), 0, "two")]
                    for handle in handles:
                        handle.test()
                        handle.wait()
            except KeyboardInterrupt:
                came += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        engine.generation.over = None
        engine.forget()
        assert engine.submit(["a"], steps(5), 0, "after it").wait() == 5
    assert came > INTERRUPTS / 4
