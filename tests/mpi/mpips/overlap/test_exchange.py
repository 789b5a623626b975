"""Training with overlap on ranks: every strategy gives the numbers of no overlap, by plans that all workers share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from mpips.overlap.exchange import STRATEGIES
from mpips.parallel.mlp import MLP
from mpips.trainer import Trainer

WORLD = MPI.COMM_WORLD
SIZES = (12, 30, 9, 40, 7, 5)
STEPS = 4


def all_ranks(ok: bool) -> bool:
    return bool(WORLD.allreduce(int(ok), op=MPI.MIN))


def train(kind: str, options: dict[str, Any], overlap: str | None, seed: int = 3) -> tuple[np.ndarray, Any] | None:
    """Parameters after a few steps and the exchange, on a worker; None on a server."""
    try:
        kv = mpips.create(kind, **options)
    except SystemExit:
        return None
    model = MLP(SIZES, loss="softmax", dtype="float64", seed=seed)
    trainer = Trainer(model, kv, "sgd", learning_rate=0.1, momentum=0.9, overlap=overlap)
    rng = np.random.default_rng(kv.rank)
    for _ in range(STEPS):
        trainer.exchange.step(rng.normal(size=(8, SIZES[0])), rng.integers(SIZES[-1], size=8))
    trainer.exchange.finish()
    kv.close()
    return model.flat_parameters, trainer.exchange


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "kind, options", [("mpi_sync", {}), ("dist_sync", {"servers": 1}), ("mpi_sync", {"servers": 1})]
)
def test_same_numbers_as_without_overlap(kind: str, options: dict[str, Any], strategy: str) -> None:
    if WORLD.size <= options.get("servers", 0):
        pytest.skip("needs a worker beside the server")
    plain, overlapped = train(kind, options, None), train(kind, options, strategy)
    ok = True
    if plain is not None and overlapped is not None:
        if options:  # servers sum in the order of the workers, whatever the length
            ok = np.array_equal(plain[0], overlapped[0])
        else:  # the MPI's own allreduce may round differently in messages of another length
            ok = np.allclose(plain[0], overlapped[0], rtol=1e-12, atol=1e-14)
    assert all_ranks(ok)


@pytest.mark.parametrize("strategy", ["single", "layerwise"])
def test_groups_are_the_strategy_s(strategy: str) -> None:
    found = train("mpi_sync", {}, strategy)
    assert found is not None
    layers = len(SIZES) - 1
    expected = ((1, layers),) if strategy == "single" else tuple((layer, layer) for layer in range(1, layers + 1))
    assert all_ranks(found[1].groups == expected)


def test_auto_measures_and_all_workers_follow_one_plan() -> None:
    found = train("mpi_sync", {}, "auto")
    assert found is not None
    exchange = found[1]
    ends = np.zeros(len(SIZES), np.int64)
    ends[: len(exchange.groups)] = [last for _, last in exchange.groups]
    everybody = np.empty((WORLD.size, len(ends)), np.int64)
    WORLD.Allgather(ends, everybody)
    measured = exchange.profile is not None and all(x.backward_s > 0 for x in exchange.profile.layers)
    assert all_ranks(measured and bool((everybody == everybody[0]).all()))


def test_bad_words_are_told() -> None:
    kv = mpips.create("mpi_sync")
    model = MLP(SIZES)
    with pytest.raises(ValueError, match="overlap='fast' is unknown"):
        Trainer(model, kv, "sgd", overlap="fast")
    with pytest.raises(ValueError, match="needs a model in layers"):
        Trainer(object(), kv, "sgd", overlap="auto")  # type: ignore[arg-type]
    kv.close()


def test_clocked_iterations_of_a_plan() -> None:
    """The tasks of a measured iteration respect the plan, and the sums are right."""
    from mpips.engine import Engine
    from mpips.overlap import execute

    engine = Engine(stall_seconds=20, timeout_seconds=40)
    comm = WORLD.Dup()
    gradients, totals = np.zeros(6), np.zeros(6)
    groups = ((1, 2), (3, 6))

    def backward(layer: int) -> None:
        gradients[layer - 1] = layer

    def send(first: int, last: int) -> Any:
        def work() -> Any:
            request = comm.Iallreduce(gradients[first - 1 : last], totals[first - 1 : last])
            while not request.Test():
                yield

        return engine.push(work, mutates=["comm"])

    tasks = execute.push_iteration(groups, lambda layer: None, backward, send)
    engine.close()
    comm.Free()
    ends = {(t.kind, t.first): t.end for t in tasks if t.kind == "backward"}
    starts = {(t.first, t.last): t.start for t in tasks if t.kind == "push"}
    ok = set(starts) == set(groups) and all(starts[group] >= ends["backward", group[0]] for group in groups)
    assert all_ranks(ok and np.array_equal(totals, WORLD.size * np.arange(1.0, 7.0)))
