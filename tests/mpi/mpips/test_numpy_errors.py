"""Programs that let NumPy raise, or make errors of warnings: the store's arithmetic goes on, and theirs raises."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from mpi4py import MPI

import collectives
import mpips
from mpips.mlp import MLP
from mpips.optimizers import Optimizer, register
from tests.mpi.mpips.support import need, run

WORLD = MPI.COMM_WORLD
OPTIMIZERS = {"sgd": {"momentum": 0.01}, "adam": {}, "adamw": {}, "adagrad": {}, "rmsprop": {}}
COMPRESSIONS = [
    {"type": "fp16"},
    {"type": "1bit"},
    {"type": "2bit", "threshold": 0.5},
    {"type": "topk", "ratio": 0.5},
    {"type": "int", "bits": 4},
]
STEPS = 12


@contextmanager
def loud() -> Iterator[None]:
    """Let NumPy raise on every floating-point event, and Python on every warning."""
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@register
@dataclass(frozen=True)
class Squares(Optimizer):
    """Takes the square of the gradient, which may underflow in the program's own arithmetic."""

    def init(self, weights: np.ndarray) -> tuple[np.ndarray, ...]:
        return ()

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: Sequence[np.ndarray], step: int) -> None:
        weights -= gradient * gradient


def rounds(kv: mpips.KVStore, key: str, size: int, dtype: str = "float32") -> bytes:
    """Rounds of a key whose gradients are tiny, and then zero: what is stored at their end."""
    out = np.empty(size, dtype)
    for step in range(STEPS):
        with np.errstate(all="ignore"):
            tiny = np.resize([1e-30, 1e-38, 1.0, 6e-8], size).astype(dtype)
        kv.pushpull(key, tiny if step < 2 else np.zeros_like(tiny), out=out)
    return out.tobytes()


@pytest.mark.parametrize("servers", [0, 1])
def test_the_stores_arithmetic_raises_nothing(servers: int) -> None:
    """Everything is made twice, and gives the same bits with and without NumPy's errors."""
    need(servers=servers)

    def body(kv: mpips.KVStore) -> dict[str, bytes]:
        found = {}
        for name, options in OPTIMIZERS.items():
            for dtype, size in (("float32", 4), ("float16", 70), ("float64", 3)):
                key = f"{name} {dtype}"
                kv.init(key, np.ones(size, dtype))
                kv.set_optimizer(name, learning_rate=0.01, keys=[key], **options)
                found[key] = rounds(kv, key, size, dtype)
        kv.init("rows", np.ones((5, 2), np.float32))
        kv.set_optimizer("adam", learning_rate=0.01, keys=["rows"])
        for _ in range(STEPS):
            kv.push("rows", mpips.RowSparse(np.array([1, 3, 1]), np.full((3, 2), 1e-30, np.float32), (5, 2)))
        found["rows"] = pulled(kv, "rows", (5, 2))
        if servers:
            table = kv.table("t", dim=3, optimizer="adam", learning_rate=0.01)
            for _ in range(STEPS):
                table.push(np.array([1, 2, 1]), np.full((3, 3), 1e-30, np.float32))
            found["table"] = table.pull(np.arange(3)).tobytes()
        for number, options in enumerate(COMPRESSIONS):
            kv.init(f"c{number}", np.ones(600, np.float32))
            kv.set_gradient_compression(options)
            found[str(options)] = rounds(kv, f"c{number}", 600)
        return found

    with np.errstate(all="ignore"):
        quiet = run("dist_sync", body, servers=servers)
    with loud():
        heard = run("dist_sync", body, servers=servers)
    everybody = WORLD.allgather((quiet, heard))
    assert all(one == other and one == everybody[0][0] for one, other in everybody if one is not None)


def pulled(kv: mpips.KVStore, key: str, shape: tuple[int, ...]) -> bytes:
    out = np.empty(shape, np.float32)
    kv.pull(key, out)
    return out.tobytes()


@pytest.mark.parametrize("servers", [0, 1])
def test_a_programs_own_optimizer_raises_what_the_program_asks_for(servers: int) -> None:
    need(servers=servers)

    def body(kv: mpips.KVStore) -> str:
        kv.init("w", np.ones(4, np.float32))
        kv.set_optimizer(Squares())
        try:
            kv.pushpull("w", np.full(4, 1e-30, np.float32))
        except (FloatingPointError, mpips.StoreError) as error:  # the servers' comes as the store's
            return str(error)
        return "nothing was raised"

    with loud():
        said = run("dist_sync", body, servers=servers)
    everybody = [one for one in WORLD.allgather(said) if one is not None]
    assert all("underflow encountered in multiply" in one for one in everybody), everybody


def test_a_network_trains_alike() -> None:
    random = np.random.default_rng(0)
    x = (random.normal(size=(40, 3)) * 40).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)

    def losses() -> list[float]:
        with mpips.create("mpi_sync") as kv:
            trainer = mpips.Trainer(MLP((3, 8, 2), loss="softmax"), kv, "adam", learning_rate=0.05, clip_norm=1e-30)
            history = trainer.fit(x, y, batch_size=4, epochs=3)
            return [epoch.loss for epoch in history] + [trainer.evaluate(x, y)["loss"]]

    quiet = losses()
    with loud():
        heard = losses()
    everybody = WORLD.allgather(quiet == heard)
    assert all(everybody)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_sums_that_overflow_are_infinite(dtype: str) -> None:
    most, wrong = np.finfo(dtype).max, []
    for n in (1, 3, 70_000):
        for op, wanted in (("sum", np.inf if WORLD.size > 1 else most), ("mean", None), ("prod", None)):
            x = np.full(n, most, dtype)
            with loud():
                collectives.allreduce(x, op=op)
                collectives.allreduce(np.full(n, np.finfo(dtype).tiny, dtype), op=op)
                collectives.grouped_allreduce([np.full(n, most, dtype), np.full(2, most, dtype)], op=op)
            wrong += [(n, op)] * bool(wanted is not None and (x != wanted).any())
    everybody = WORLD.allgather(wrong)
    assert not any(everybody), everybody
