"""A store without servers: one collective for a list, the same bits whatever way a call goes, and alike again after an
generation has ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpips
from tests.mpi.mpips.support import WORLD, need, run

SIZES = [3, 1, 0, 20_000, 70_001, 30_000]
"""Elements of float32: some of these values lie in one piece, others are spread over the workers."""
NAMES = [f"k{index}" for index in range(len(SIZES))]
WAYS = ("list", "in place", "one by one", "started", "list of arrays", "push, pull")


def values(rank: int, turn: int) -> list[Any]:
    """Numbers whose sums are rounded."""
    random = np.random.default_rng([rank, turn])
    return [random.standard_normal(size, np.float32) for size in SIZES]


def pushpull(kv: mpips.KVStore, way: str, given: list[Any]) -> list[Any]:
    """Push and pull all keys, in a way of many; what came back."""
    outs = [np.empty_like(value) for value in given]
    if way == "list":
        kv.pushpull(NAMES, given, outs)
    elif way == "in place":
        outs = [value.copy() for value in given]
        kv.pushpull(NAMES, outs)
    elif way == "one by one":
        for name, value, out in zip(NAMES, given, outs):
            kv.pushpull(name, value, out)
    elif way == "started":
        kv.ipushpull(NAMES, given, outs).wait()
    elif way == "list of arrays":
        kv.pushpull(NAMES, [[value] for value in given], outs)
    else:
        kv.push(NAMES, given)
        kv.pull(NAMES, outs)
    return outs


def alike(outs: list[Any]) -> bool:
    """Whether all workers have the same bits."""
    return len(set(WORLD.allgather(b"".join(out.tobytes() for out in outs)))) == 1


@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
def test_all_ways_give_the_same_bits(optimizer):
    def body(kv):
        results = []
        for way in WAYS:
            kv.init(NAMES, [np.ones(size, np.float32) for size in SIZES])
            if optimizer:
                kv.set_optimizer(optimizer, learning_rate=0.1)
            outs = [pushpull(kv, way, values(kv.rank, turn)) for turn in range(3)]
            pulled = [np.empty_like(out) for out in outs[-1]]
            kv.pull(NAMES, pulled)
            assert all(map(np.array_equal, pulled, outs[-1])), way
            assert alike(pulled), way
            results.append([array for turn in outs for array in turn])
            kv.forget(NAMES)
        for way, result in zip(WAYS, results):
            assert all(map(np.array_equal, result, results[0])), way

    run("mpi_sync", body, servers=0)


@pytest.mark.mpi(min_size=2)
def test_workers_may_go_unlike_ways_in_one_round():
    """A worker that has its own block of a value only, one that has all of it, and one beside compute."""

    def body(kv):
        kv.init(NAMES, [np.zeros(size, np.float32) for size in SIZES])
        ways = [way for way in WAYS if way != "one by one"]
        for turn in range(12):
            given = values(kv.rank, turn)
            pushpull(kv, ways[(kv.rank * (1 + turn // 5) + turn) % len(ways)], given)
            if turn % 3 == kv.rank % 3:
                continue  # this worker does not pull
            outs = [np.empty_like(value) for value in given]
            kv.pull(NAMES, outs)
            total = [sum(parts[1:], parts[0]) for parts in zip(*(values(rank, turn) for rank in range(need())))]
            assert all(np.allclose(out, want, atol=1e-5) for out, want in zip(outs, total))
        outs = [np.empty(size, np.float32) for size in SIZES]
        kv.pull(NAMES, outs)
        assert alike(outs)

    run("mpi_sync", body, servers=0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [100, 70_001])
def test_results_may_overlap_what_other_keys_push(size):
    def body(kv):
        kv.init(["a", "b"], [np.zeros(size), np.zeros(size)])
        x = np.arange(2 * size + 1.0) + kv.rank
        kv.pushpull(["a", "b"], [x[:size], x[size : 2 * size]], [x[size + 1 :], x[1 : size + 1]])
        outs = [np.empty(size), np.empty(size)]
        kv.pull(["a", "b"], outs)
        ranks = sum(range(kv.num_workers))
        for number, out in enumerate(outs):
            assert np.array_equal(out, kv.num_workers * (np.arange(size) + number * size) + ranks)
        assert np.array_equal(x[1 : size + 1], outs[1])

    run("mpi_sync", body, servers=0)


@pytest.mark.mpi(min_size=2)
def test_a_fast_call_is_fast_again_after_one_that_was_started(monkeypatch):
    """Fault 8."""

    def body(kv):
        kv.init("w", np.zeros(9))
        kv.ipush("w", np.ones(9)).wait()
        monkeypatch.setattr(kv._operations, "do", lambda *words: pytest.fail("the general path"))
        x = np.ones(9)
        kv.pushpull("w", x)
        assert (x == kv.num_workers).all()

    run("mpi_sync", body, servers=0)


@pytest.mark.mpi(min_size=2)
def test_the_order_of_a_list_counts():
    def body(kv):
        kv.init(["a", "b"], [np.zeros(5), np.zeros(5)])
        names = ["a", "b"] if kv.rank else ["b", "a"]
        with pytest.raises(mpips.MismatchError, match=r"push of keys 'b', 'a'.*push of keys 'a', 'b'"):
            kv.pushpull(names, [np.ones(5), np.ones(5)])
        rounds = kv.recover()
        assert rounds == {"a": 0, "b": 0} and rounds.torn == ()
        x = [np.ones(5), np.ones(5)]
        kv.pushpull(["a", "b"], x)
        assert (x[1] == kv.num_workers).all()

    run("mpi_sync", body, servers=0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("optimizer", [None, "adam"])
@pytest.mark.parametrize("size", [50, 100_000])
def test_who_has_not_completed_a_round_takes_it_over(monkeypatch, optimizer, size):
    """The last worker is interrupted when the sum is there and it has not taken it."""

    def body(kv):
        last = kv.num_workers - 1
        kv.init(["a", "b"], [np.zeros(size), np.zeros(size)])
        if optimizer:
            kv.set_optimizer(optimizer)
        kv.pushpull(["a", "b"], [np.ones(size), np.ones(size)])
        if kv.rank == last:
            from mpips.store.replicated.replica import Replica

            def interrupted(self: Replica, *total: Any) -> None:
                raise KeyboardInterrupt

            with monkeypatch.context() as patched:
                for name in ("take_sum", "take_block"):
                    patched.setattr(Replica, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    kv.pushpull(["a", "b"], [np.ones(size), np.full(size, 2.0)])
        else:
            values = [np.ones(size), np.full(size, 2.0)]
            with pytest.raises(mpips.StoreError):  # in the push of who is slower than the last
                (kv.pushpull(["a", "b"], values), kv.barrier())
        assert kv.recover() == {"a": 2, "b": 2}
        outs = [np.empty(size), np.empty(size)]
        kv.pull(["a", "b"], outs)
        assert alike(outs)
        if optimizer is None:
            assert (outs[1] == 2 * kv.num_workers).all()
        for _ in range(3):
            kv.pushpull(["a", "b"], [np.ones(size), np.full(size, 2.0)], outs)
        assert alike(outs)

    run("mpi_sync", body, servers=0)


@pytest.mark.mpi(min_size=2)
def test_a_key_that_is_torn_everywhere_is_named(monkeypatch):
    def body(kv):
        from mpips.optimizers import SGD

        kv.init(["a", "b"], [np.zeros(50), np.zeros(50)])
        kv.set_optimizer("sgd")
        kv.pushpull(["a", "b"], [np.ones(50), np.ones(50)])

        def broken(self: SGD, weights: Any, gradient: Any, state: Any, step: int) -> None:
            weights[: kv.rank + 1] = 7
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(SGD, "update", broken)
            with pytest.raises((KeyboardInterrupt, mpips.StoreError)):
                kv.pushpull(["a", "b"], [np.ones(50), np.ones(50)])
        rounds = kv.recover()
        assert (rounds, rounds.torn) == ({"a": 1, "b": 1}, ("a",))
        outs = [np.empty(50), np.empty(50)]
        kv.pull(["a", "b"], outs)
        assert alike(outs)

    run("mpi_sync", body, servers=0)
