"""The engine without MPI: order, results, errors, who does the work, and that waiting costs next to nothing."""

from __future__ import annotations

import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator

import pytest

from mpips import meet
from mpips.engine import DependencyError, Engine, Task


@pytest.fixture(params=[True, False], ids=["background", "foreground"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(stall_seconds=30, timeout_seconds=30, background=request.param)
    yield engine
    engine.close()


@pytest.fixture
def background() -> Iterator[Engine]:
    engine = Engine(stall_seconds=30, timeout_seconds=30)
    yield engine
    engine.close()


def until(event: threading.Event, result: object = None) -> Task:
    while not event.is_set():
        yield
    return result


def fails(sentence: str) -> Callable[[], None]:
    def work() -> None:
        raise ValueError(sentence)

    return work


def test_an_operation_runs_and_its_result_comes_back(engine: Engine) -> None:
    box = {"b": 1}

    def work() -> str:
        box["a"] = box["b"] + 1
        return "sum"

    handle = engine.push(work, reads=["b"], mutates=["a"])
    assert handle.wait() == "sum"
    assert handle.test()
    assert box["a"] == 2


def test_it_goes_on_without_the_training_thread(background: Engine) -> None:
    gate, seen = threading.Event(), []
    started = threading.Event()

    def work() -> Task:
        seen.append(threading.current_thread())
        started.set()
        yield from until(gate, 3)

    handle = background.push(work, mutates=["x"])
    assert started.wait(10)
    assert seen[0] is not threading.current_thread()
    gate.set()
    for _ in range(1000):
        if handle.done:
            break
        time.sleep(0.01)
    assert handle.done


def test_conflicts_keep_program_order_whatever_the_priority(engine: Engine) -> None:
    order: list[str] = []
    gate = threading.Event()

    def gated() -> Task:
        yield from until(gate)
        order.append("write")

    engine.push(gated, mutates=["x"])
    engine.push(lambda: order.append("read"), reads=["x"], priority=10)
    engine.push(lambda: order.append("write again"), mutates=["x"], priority=20)
    engine.push(lambda: order.append("elsewhere"), mutates=["y"]).wait()
    assert order == ["elsewhere"]
    gate.set()
    engine.finish()
    assert order == ["elsewhere", "write", "read", "write again"]


def test_priority_orders_what_is_independent(engine: Engine) -> None:
    order: list[int] = []
    with engine.paused():
        for priority in (1, 3, 2, 3):
            engine.push(lambda p=priority: order.append(p), mutates=[object()], priority=priority)
    engine.finish()
    assert order == [3, 3, 2, 1]


def test_generators_go_on_together(engine: Engine) -> None:
    first, second = threading.Event(), threading.Event()

    def one() -> Task:
        first.set()
        yield from until(second)

    def two() -> Task:
        yield from until(first)
        second.set()

    handles = [engine.push(one, mutates=["a"]), engine.push(two, mutates=["b"])]
    for handle in handles:
        handle.wait()


def test_errors_surface_at_wait_and_at_finish(engine: Engine) -> None:
    handle = engine.push(fails("broken pipe"), mutates=["x"])
    with pytest.raises(ValueError, match="broken pipe"):
        handle.wait()
    engine.push(fails("again"), mutates=["x"])
    with pytest.raises(ValueError, match="again"):
        engine.finish()
    engine.finish()


def test_what_depends_on_a_failure_is_not_run(engine: Engine) -> None:
    ran: list[str] = []
    with engine.paused():
        failing = engine.push(fails("no gradient"), mutates=["g"], what="reduce")
        using = engine.push(lambda: ran.append("use"), reads=["g"], mutates=["w"], what="update")
        after = engine.push(lambda: ran.append("after"), reads=["w"], what="copy")
        engine.push(lambda: ran.append("other"), reads=["h"])
    with pytest.raises(DependencyError, match=r"copy was not run: reduce failed: no gradient"):
        after.wait()
    late = engine.push(lambda: ran.append("late"), reads=["w"])
    with pytest.raises(ValueError, match="no gradient"):
        failing.wait()
    with pytest.raises(DependencyError, match="update was not run"):
        using.wait()
    with pytest.raises(DependencyError):
        late.wait()
    engine.push(lambda: ran.append("fresh"), reads=["w"]).wait()
    engine.finish()
    assert ran == ["other", "fresh"]


def test_submitted_operations_on_a_key_run_in_order_even_after_a_failure(engine: Engine) -> None:
    ran: list[str] = []

    def task(name: str) -> Task:
        yield
        if name == "bad":
            raise ValueError(name)
        ran.append(name)

    bad = engine.submit(["k"], task("bad"), 0, "push of k")
    engine.submit(["k"], task("pull"), 5, "pull of k").wait()
    with pytest.raises(ValueError, match="bad"):
        bad.wait()
    engine.run(["k"], task("again"), 0, lambda: "push of k")
    assert ran == ["pull", "again"]


def test_an_operation_that_waits_for_another_is_told(engine: Engine) -> None:
    gate = threading.Event()
    other = engine.push(lambda: until(gate), mutates=["x"], what="the other")
    handle = engine.push(lambda: other.wait(), mutates=["y"])
    with pytest.raises(RuntimeError, match="waits for the other: name what it needs in `reads`"):
        handle.wait()
    gate.set()
    engine.finish()


def test_nothing_goes_on_while_paused(background: Engine) -> None:
    ran: list[int] = []
    with background.paused():
        background.push(lambda: ran.append(1))
        time.sleep(0.05)
        assert not ran
    background.finish()
    assert ran == [1]


def test_a_wait_that_is_too_long_says_for_what() -> None:
    engine = Engine(stall_seconds=30, timeout_seconds=0.05)
    handle = engine.push(lambda: until(threading.Event()), what="pull of key 'w'")
    with pytest.raises(TimeoutError, match="pull of key 'w'"):
        handle.wait()
    engine.close()


def test_waiting_in_the_background_is_cheap(background: Engine) -> None:
    """Looks cost about a twenty-fifth of the time; the test allows a noisy machine five times that, in one of three."""
    gate, shares = threading.Event(), []
    handle = background.push(lambda: until(gate), mutates=["x"])
    for _ in range(3):
        begin, cpu = time.monotonic(), time.process_time()
        time.sleep(0.3)
        shares.append((time.process_time() - cpu) / (time.monotonic() - begin))
    assert min(shares) < 0.2
    gate.set()
    handle.wait()


def test_closing_ends_the_thread(background: Engine) -> None:
    background.push(lambda: None).wait()
    background.close()
    assert all(thread.name != "mpips communication" for thread in threading.enumerate())


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
def test_an_error_that_was_seen_is_not_raised_again(background: Engine) -> None:
    """However soon its owner sees it: he may look while the communication thread is just ending the operation."""
    for _ in range(1500):
        handle = background.push(fails("once"), reads=[], mutates=["a"])
        while not handle.done:
            pass
        with pytest.raises(ValueError, match="once"):
            handle.wait()
        background.finish()


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_long_operation_sleeps_and_stalls_only_where_nothing_goes_on(
    monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    now, slept = [0.0], []
    clock = types.SimpleNamespace(monotonic=lambda: now[0], sleep=slept.append)
    monkeypatch.setattr(meet, "time", clock)

    def work(step: float) -> Task:
        for look in range(1000):
            now[0] += step
            yield goes_on and look % 20 == 0

    engine = Engine(stall_seconds=1, background=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run([], work(5e-5), 0, lambda: "work")
        assert bool(slept) == (not goes_on)
        engine.run([], work(5e-2), 0, lambda: "work")
    assert bool(caught) == (not goes_on)
