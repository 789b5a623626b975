"""The engine without MPI: order, results, errors, who does the work, and that waiting costs next to nothing."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator

import pytest

from collectives.fabric import wait
from mpips import StoreError
from mpips.store.runtime.engine import Alone, DependencyError, Engine
from mpips.store.runtime.tasks import Task as GenericTask

Task = GenericTask[object]


@pytest.fixture(params=[True, False], ids=["background", "foreground"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(Alone(30, 30), request.param)
    yield engine
    engine.close()


@pytest.fixture
def background() -> Iterator[Engine]:
    engine = Engine(Alone(30, 30))
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


class Ending:
    """A generation that ends when it is told to, or by an operation that fails."""

    def __init__(self) -> None:
        self.limits = wait.Limits(30, 30)
        self.over: BaseException | None = None
        self.ended: list[str] = []

    def check(self) -> None:
        if self.over is not None:
            raise self.over

    def look(self, waited: float) -> None:
        self.check()

    def end(self, what: str, error: BaseException) -> BaseException:
        self.ended.append(what)
        self.over = self.over or StoreError(f"{what}: {error}")
        return self.over


@pytest.fixture(params=[True, False], ids=["background", "foreground"])
def ending(request: pytest.FixtureRequest) -> Iterator[Engine]:
    engine = Engine(Ending(), request.param)
    yield engine
    engine.close()


def bad() -> Task:
    yield
    raise ValueError("no route")


def test_an_operation_of_the_store_that_fails_ends_all_others(ending: Engine) -> None:
    ran: list[str] = []

    def after() -> Task:
        ran.append("after")
        yield

    handles = [ending.submit(["k"], bad(), 0, "push of k"), ending.submit(["k"], after(), 5, "pull of k")]
    handles.append(ending.submit(["j"], until(threading.Event()), 0, "push of j"))
    for handle in handles:
        with pytest.raises(StoreError, match="push of k: no route"):
            handle.wait()
    assert not ran
    ending.forget()
    ending.finish()


def test_a_wait_hears_that_the_generation_has_ended(ending: Engine) -> None:
    closed = threading.Event()

    def forever() -> Task:
        try:
            while True:
                yield
        finally:
            closed.set()

    handle = ending.submit(["k"], forever(), 0, "pull of k")
    ending.generation.over = StoreError("rank 1 has left")  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="rank 1 has left"):
        handle.wait()
    assert closed.is_set()
    with pytest.raises(StoreError, match="rank 1 has left"):
        ending.run([], until(threading.Event()), 0, lambda: "push of k")


def test_submitted_operations_on_a_key_run_in_order(engine: Engine) -> None:
    ran: list[str] = []

    def task(name: str) -> Task:
        yield
        ran.append(name)

    engine.submit(["k"], task("push"), 0, "push of k")
    engine.submit(["k"], task("pull"), 5, "pull of k").wait()
    engine.run(["k"], task("again"), 0, lambda: "push of k")
    assert ran == ["push", "pull", "again"]


def test_what_is_detached_is_waited_for_at_the_end_alone(engine: Engine) -> None:
    gate = threading.Event()
    saving = engine.submit([], until(gate), 0, "save", detached=True)
    engine.push(lambda: None).wait()
    engine.finish()
    assert not saving.done
    gate.set()
    engine.finish(detached=True)
    assert saving.done


def test_a_program_that_ends_with_operations_under_way_ends() -> None:
    """Whoever owns the engine finishes it at exit, when the thread is still there."""
    script = """
import atexit, time
from mpips.store.runtime.engine import Engine
engine = Engine()
def work():
    end = time.monotonic() + 0.2
    while time.monotonic() < end:
        yield
atexit.register(lambda: (engine.finish(), print("finished"), engine.close()))
engine.submit(["k"], work(), 0, "ipushpull")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "finished\n"


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
    engine = Engine(Alone(30, 0.05))
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
    monkeypatch.setattr(wait, "time", clock)

    def work(step: float) -> Task:
        for look in range(1000):
            now[0] += step
            yield goes_on and look % 20 == 0

    engine = Engine(Alone(1), False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine.run([], work(5e-5), 0, lambda: "work")
        assert bool(slept) == (not goes_on)
        engine.run([], work(5e-2), 0, lambda: "work")
    assert bool(caught) == (not goes_on)
