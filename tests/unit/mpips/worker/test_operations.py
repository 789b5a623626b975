"""Calls on a stand-in for the backend: what is checked before, what goes which way, and what ends the generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collectives import CollectiveError
from collectives.errors import of_caller
from collectives.fabric.wait import Limits
from mpips import RowSparse, StoreError
from mpips.store.keys.key import Key
from mpips.store.runtime.engine import Engine
from mpips.store.worker.route import Operations, Route
from tests.unit.collectives import device

F4 = np.dtype(np.float32)


class Generation:
    """One that ends by what this rank finds."""

    def __init__(self) -> None:
        self.limits = Limits(30, 30)
        self.over: StoreError | None = None

    def check(self) -> None:
        if self.over is not None:
            raise self.over

    def look(self, waited: float) -> None:
        self.check()

    def end(self, what: str, error: BaseException) -> BaseException:
        self.over = self.over or StoreError(f"{what}: {error}")
        return self.over if isinstance(error, CollectiveError) else error


class Backend:
    """One worker's store: a push replaces the value. `said` tells which calls came."""

    communicators = ()
    quick_list = None

    def __init__(self) -> None:
        self.direct = False
        self.said: list[str] = []
        self.values: dict[Any, np.ndarray] = {}
        self.fails: BaseException | None = None

    def check_updated(self, keys, what: str) -> None:
        pass

    @property
    def transfers(self) -> Backend:
        return self

    def listen(self) -> None:
        pass

    def push(self, keys: Any, flats: Any, priority: int) -> Iterator[bool]:
        self.said.append(f"push {[key.name for key in keys]} {'direct' if self.direct else 'beside'}")
        yield True
        if self.fails is not None:
            raise self.fails
        self.values.update((key.name, flat.copy()) for key, flat in zip(keys, flats))

    def pull(self, keys: Any, outs: Any) -> Iterator[bool]:
        yield False
        for key, out in zip(keys, outs):
            out[...] = self.values[key.name]

    def pushpull(self, keys: Any, flats: Any, outs: Any, priority: int) -> Iterator[bool]:
        yield from self.push(keys, flats, priority)
        yield from self.pull(keys, outs)

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Iterator[bool]:
        self.said.append(f"rows {key.name}")
        yield False


class Store:
    """A backend, and the calls on it; "a" and "b" are keys of shape (2, 3)."""

    def __init__(self, background: bool) -> None:
        self.generation, self.backend = Generation(), Backend()
        self.engine = Engine(self.generation, background)
        self.keys = {name: Key(name, (2, 3), F4) for name in "ab"}
        self.operations = Operations(0, self.backend, self.engine, self.keys)  # type: ignore[arg-type]
        self.quick = Route(self.keys, self.engine.under_way, self.operations, self.backend)  # type: ignore[arg-type]


@pytest.fixture(params=[True, False], ids=["background", "foreground"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    store = Store(request.param)
    yield store
    store.engine.close()


def full(value: float) -> np.ndarray:
    return np.full((2, 3), value, np.float32)


@pytest.mark.parametrize("key, value, error", [
    ("c", full(1), ValueError),
    ("a", full(1).T, ValueError),
    ("a", full(1).astype(np.float64), ValueError),
    ("a", "no", TypeError),
    (["a", "b"], [full(1)], ValueError),
    (["a", "b"], [full(1), object()], TypeError),
])  # fmt: skip
def test_a_bad_argument_changes_nothing_and_ends_nothing(store: Store, key: Any, value: Any, error: Any) -> None:
    for make in (
        lambda: store.operations.do("push", key, value, None, 0),
        lambda: store.operations.start("pushpull", key, value, None, 0, ()),
    ):
        with pytest.raises(error):
            make()
    assert not store.backend.said
    assert store.generation.over is None


def test_a_call_alone_may_block_and_one_beside_others_may_not(store: Store) -> None:
    store.operations.do("push", "a", full(1), None, 0)
    handle = store.operations.start("push", "a", full(2), None, 0, ())
    handle.wait()
    assert store.backend.said == ["push ['a'] direct", "push ['a'] beside"]


def test_lists_go_to_the_backend_whole_and_rows_after_them(store: Store) -> None:
    values = [full(1), full(2)]
    store.operations.do("pushpull", ["a", "b"], values, None, 0)
    assert store.backend.said.pop() == "push ['a', 'b'] direct"
    rows = RowSparse(np.array([1]), np.ones((1, 3), np.float32), (2, 3))
    store.operations.do("push", ["a", "b"], [rows, full(2)], None, 0)
    assert store.backend.said == ["push ['b'] direct", "rows a"]


def test_what_is_written_for_one_key_may_be_what_is_pushed_of_another(store: Store) -> None:
    first, second = full(1), full(2)
    store.operations.do("pushpull", ["a", "b"], [first, second], [second, first], 0)
    assert (first == 2).all()
    assert (second == 1).all()


def test_a_failure_ends_the_generation_for_all_later_calls(store: Store) -> None:
    store.backend.fails = CollectiveError("rank 1 has left")
    with pytest.raises(StoreError, match="push of key 'a': rank 1 has left"):
        store.operations.do("push", "a", full(1), None, 0)
    store.backend.fails = None
    for what in ("push", "pull"):
        with pytest.raises(StoreError, match="push of key 'a': rank 1 has left"):
            store.operations.do(what, "b", full(1), full(0), 0)


def test_a_bug_is_raised_as_it_is_and_ends_the_generation(store: Store) -> None:
    store.backend.fails = ZeroDivisionError("division by zero")
    with pytest.raises(ZeroDivisionError):
        store.operations.do("push", "a", full(1), None, 0)
    assert store.generation.over is not None


def test_a_failed_handle_ends_the_generation(store: Store) -> None:
    store.backend.fails = CollectiveError("rank 1 has left")
    handles = [store.operations.start("push", name, full(1), None, 0, ()) for name in "ab"]
    for handle in handles:
        with pytest.raises(StoreError, match="rank 1 has left"):
            handle.wait()


def test_what_all_workers_refuse_ends_nothing(store: Store) -> None:
    store.backend.fails = of_caller(ValueError("no such optimizer"))
    with pytest.raises(ValueError, match="no such optimizer"):
        store.operations.do("push", "a", full(1), None, 0)
    assert store.generation.over is None


@pytest.mark.parametrize("error", [CollectiveError("rank 1 has left"), KeyboardInterrupt(), SystemExit(3)])
def test_a_fast_route_that_fails_ends_the_generation(store: Store, error: BaseException) -> None:
    class Fast:
        lists = True

        def push(self, array: np.ndarray, priority: int) -> None:
            raise error

    store.keys["a"].fast = Fast()  # type: ignore[assignment]
    with pytest.raises(type(error) if not isinstance(error, CollectiveError) else StoreError):
        store.quick.try_fast("push", "a", full(1), None, 0)
    assert store.generation.over is not None


def test_the_fast_route_takes_plain_arrays_alone(store: Store) -> None:
    pushed: list[np.ndarray] = []

    class Fast:
        lists = True

        def push(self, array: np.ndarray, priority: int) -> None:
            pushed.append(array)

        post = push

        def read(self) -> None:
            pass

        def pushpull(self, array: np.ndarray, out: np.ndarray, priority: int) -> None:
            out[...] = array

    for key in store.keys.values():
        key.fast = Fast()  # type: ignore[assignment]
    ones = full(1)
    assert store.quick.try_fast("push", "a", ones, None, 0)
    assert pushed[0] is ones
    assert store.quick.try_fast("push", ["a", "b"], [ones, ones], None, 0)
    assert len(pushed) == 3
    out = full(0)
    assert store.quick.try_fast("pushpull", "a", ones, out, 0)
    assert (out == 1).all()
    locked = full(0)
    locked.flags.writeable = False
    for value, target in ((ones.T, None), (ones.astype(int), None), ([ones], None), (locked, None), (ones, [out])):
        assert not store.quick.try_fast("pushpull", "a", value, target, 0)
    assert not store.quick.try_fast("push", np.int64(3), ones, None, 0)
    assert not store.quick.try_fast("push", "a", ones, None, "high")
    assert len(pushed) == 3


def test_arrays_on_gpus_are_pushed_and_pulled(store: Store) -> None:
    with device.installed():
        values = [device.asarray(full(number), number) for number in (1, 2)]
        store.operations.do("pushpull", "a", values, None, 0)
        assert all((value.get() == 3).all() for value in values)
        store.operations.start("pushpull", ["a", "b"], [values, full(4)], None, 0, ()).wait()
        assert all((value.get() == 6).all() for value in values)


def test_a_closed_store_says_so(store: Store) -> None:
    store.operations.closed = True
    with pytest.raises(RuntimeError, match="the store is closed: make this call before close"):
        store.operations.do("push", "a", full(1), None, 0)
