"""Training with overlap on ranks: every strategy gives the numbers of no overlap, by plans that all workers share."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from mpi4py import MPI

import mpips
from examples.reproduce.overlap import measured as bench
from mpips.mlp import MLP
from mpips.overlap import JointPlan
from mpips.overlap.exchange import CHOICES, Execution, Overlapped
from mpips.overlap.messages import StoreMessages
from mpips.training import Trainer
from tests.mpi.jobs import job
from tests.mpi.mpips.overlap.support import SIZES, STORES, WORLD, all_ranks, exchange_of, worker
from tests.mpi.sizes import either_mpi, only_on

STEPS = 4


def train(
    kind: str,
    options: dict[str, Any],
    overlap: str | None,
    compression: dict[str, Any] | None = None,
    sizes: tuple[int, ...] = SIZES,
    dtype: str = "float64",
    comm: MPI.Comm = WORLD,
) -> tuple[np.ndarray, Any] | None:
    """Parameters after a few steps and the exchange, on a worker; None on a server."""
    try:
        kv = mpips.create(kind, comm=comm, **options)
    except SystemExit:
        return None
    if compression is not None:
        kv.set_gradient_compression(compression)
    model = MLP(sizes, loss="softmax", dtype=dtype, seed=3)
    trainer = Trainer(model, kv, "sgd", learning_rate=0.1, momentum=0.9, overlap=overlap)
    rng = np.random.default_rng(kv.rank)
    for _ in range(STEPS):
        trainer.exchange.step(rng.normal(size=(8, sizes[0])).astype(dtype), rng.integers(sizes[-1], size=8))
    trainer.exchange.finish()
    kv.close()
    return model.flat_parameters, trainer.exchange


class Nodes(MPI.Intracomm):
    """A communicator of which every rank, or every pair, is taken for a node by itself."""

    ranks = 1

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Any:
        return self.Split(self.rank // self.ranks, key)


class Pairs(Nodes):
    ranks = 2


FORMS = ("auto", "layerwise", "single", "joint")
BITS = [
    ("mpi_sync", {}),
    ("dist_sync", {"servers": 1}),
    ("mpi_sync", {"servers": 1}),
    ("mpi_sync", {"servers": 1, "clients": 2}),
    ("mpi_sync", {"servers": 2, "masters": "all", "big_array": 100}),
    pytest.param("mpi_sync", {"servers": 1, "clients": 3}, marks=pytest.mark.full),
    pytest.param("mpi_sync", {"servers": 2, "clients": 2}, marks=pytest.mark.full),
]


@either_mpi
@pytest.mark.parametrize(
    "nodes",
    [
        pytest.param(MPI.Intracomm, marks=only_on(1, 3, 4)),
        pytest.param(Nodes, marks=only_on(1, 2, 4)),
        pytest.param(Pairs, marks=only_on(3, 4, 5)),
    ],
)
@pytest.mark.parametrize("kind, options", BITS)
def test_no_strategy_changes_a_bit(
    kind: str, options: dict[str, Any], nodes: type[MPI.Intracomm], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one node and between nodes, with keys from a few bytes to some that no slot holds and that go in pieces. What
    messages cost is made up, so that strategies that measure differ and take no time for it. Strategies that differ in
    their groups alone run on one node, those of FORMS everywhere."""
    monkeypatch.setattr(Overlapped, "_costs", lambda exchange: ((1e-4, 2e-9), (1e-4, 2e-9)))
    if WORLD.size < options.get("servers", 0) + options.get("clients", 1):
        pytest.skip("needs a worker in every client beside the servers")
    strategies, comm = CHOICES if nodes is MPI.Intracomm else FORMS, nodes(WORLD.Dup())
    given = {**options, "chunk_bytes": 1 << 15}
    plain, others = (
        [train(kind, given, strategy, sizes=(60, 300, 9, 40, 7, 5), dtype="float32", comm=comm) for strategy in wanted]
        for wanted in ((None,), strategies)
    )
    different = [
        strategy
        for strategy, found in zip(strategies, others)
        if found and plain[0] and found[0].tobytes() != plain[0][0].tobytes()
    ]
    comm.Free()
    assert all_ranks(not different), different


@either_mpi
@only_on(1, 2, 3, 4)
@pytest.mark.parametrize("strategy", ["layerwise", "auto"])
@pytest.mark.parametrize("kind, options", STORES)
def test_groups_are_pushed_compressed(kind: str, options: dict[str, Any], strategy: str) -> None:
    """Top-k of all elements rounds every gradient to float32 and keeps the rest back, whatever the groups."""
    if WORLD.size <= options.get("servers", 0):
        pytest.skip("needs a worker beside the server")
    everything = {"type": "topk", "ratio": 1.0}
    plain, overlapped = (train(kind, options, overlap, compression=everything) for overlap in (None, strategy))
    exact = train(kind, options, None)
    ok = True
    if plain is not None and overlapped is not None and exact is not None:
        ok = np.array_equal(plain[0], overlapped[0])
        ok &= not np.array_equal(plain[0], exact[0])
    assert all_ranks(ok)


@pytest.mark.parametrize("strategy", ["single", "layerwise"])
def test_groups_are_the_strategy_s(strategy: str) -> None:
    found = train("mpi_sync", {}, strategy)
    assert found is not None
    layers = len(SIZES) - 1
    expected = ((1, layers),) if strategy == "single" else tuple((layer, layer) for layer in range(1, layers + 1))
    assert all_ranks(found[1].plan.push == expected)


def same_plans(exchange: Overlapped, comm: MPI.Comm) -> bool:
    """Whether all workers have gone through the same plans."""
    mine = np.zeros(4096, np.int64)
    flat = [number for plan in exchange.plans for part in plan for number in np.ravel(part)]
    mine[: len(flat)] = flat
    everybody = np.empty((comm.size, len(mine)), np.int64)
    comm.Allgather(mine, everybody)
    return bool((everybody == everybody[0]).all())


@either_mpi
@pytest.mark.parametrize("kind, options", STORES)
def test_auto_measures_and_all_workers_follow_one_plan(kind: str, options: dict[str, Any]) -> None:
    kv, ok = worker(kind, options), True
    if kv is not None:
        exchange = exchange_of(kv, Sluggish())
        step(exchange, kv.rank, 0)
        exchange.finish()
        profile = exchange.profile
        ok = profile is not None and all(layer.backward_s > 0 for layer in profile.layers)
        ok &= same_plans(exchange, kv.layout.workers)
        kv.close()
    assert all_ranks(ok)


class Sluggish(MLP):
    """Every layer takes `extra` seconds more, forward and backward."""

    extra = 0.0

    def __init__(self) -> None:
        super().__init__(SIZES, loss="softmax", dtype="float64", seed=3)

    def loss_and_gradients(self, x: Any, y: Any, before: Any = None, ready: Any = None) -> float:
        def later(layer: int) -> None:
            time.sleep(self.extra)
            if ready:
                ready(layer)

        def sooner(layer: int) -> None:
            time.sleep(self.extra)
            if before:
                before(layer)

        return super().loss_and_gradients(x, y, sooner, later)


def step(exchange: Overlapped, rank: int, seed: int) -> None:
    """An iteration on a batch of this rank's own."""
    rng = np.random.default_rng([seed, rank])
    exchange.step(rng.normal(size=(8, SIZES[0])), rng.integers(SIZES[-1], size=8))


@pytest.mark.core(1)
@either_mpi
@only_on(3, 4)
@pytest.mark.parametrize("kind, options", STORES)
def test_slower_layers_change_the_plan_and_no_number(kind: str, options: dict[str, Any]) -> None:
    """Layers become slower in the middle of training: the plan changes, on all workers alike; parameters and the
    optimizer's state go on as without overlap."""
    results: list[np.ndarray] = []
    ok = True
    for overlap in (False, True):
        kv = worker(kind, options)
        if kv is None:
            continue
        model = Sluggish()
        exchange: Any
        if overlap:
            exchange = exchange_of(kv, model, strategy="optimal", review_every=2)
        else:
            exchange = Trainer(model, kv, "adam", learning_rate=0.01).exchange
        for number in range(9):
            model.extra = 0.01 if overlap and number > 2 else 0.0
            rng = np.random.default_rng([number, kv.rank])
            exchange.step(rng.normal(size=(8, SIZES[0])), rng.integers(SIZES[-1], size=8))
        exchange.finish()
        if overlap:
            ok &= same_plans(exchange, kv.layout.workers)
            ok &= len(exchange.plans[0].push) < len(exchange.plan.push)
            slowest = max(layer.backward_s for layer in exchange.profile.layers)
            ok &= slowest >= 0.01
        results.append(model.flat_parameters.copy())
        kv.close()
    if results:
        plain, overlapped = results
        ok &= np.array_equal(plain, overlapped)
    assert all_ranks(ok)


CUTS = (
    JointPlan(((1, 2), (3, 5)), 0, ((1, 1), (2, 4), (5, 5))),
    JointPlan(((1, 3), (4, 5)), 1, ((1, 3),)),
    JointPlan(((1, 5),), 0, ((1, 3), (4, 5))),
)


def test_pushes_and_pulls_cut_differently() -> None:
    """A plan whose pull groups are not its push groups, then another one: the sums are right, and state is kept."""
    options = {"servers": 1}
    kv, ok = worker("dist_sync", options), True
    if kv is not None:
        elements = [4, 3, 2, 5, 1]
        gradients, parameters = np.arange(15.0), np.zeros(15)
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        messages = StoreMessages(kv, gradients, parameters, elements)
        expected, velocity = np.zeros(15), np.zeros(15)

        def keep(seen: list[np.ndarray], layer: int) -> None:
            seen.append(parameters.copy())

        for plan in CUTS:
            messages.plan(plan)
            execution = Execution(messages, plan)
            for _ in range(2):
                arrived: list[np.ndarray] = []
                take = partial(keep, arrived)
                tasks = bench.iteration(execution, len(elements), take, lambda layer: None)
                velocity = 0.5 * velocity - kv.num_workers * gradients
                expected = expected + velocity
                stops = np.cumsum(elements)
                ok &= all(np.allclose(got[:stop], expected[:stop]) for got, stop in zip(arrived, stops))
                pulled = {(task.first, task.last) for task in tasks if task.kind == "pull"}
                ok &= pulled == {*plan.pull, *plan.push[len(plan.push) - plan.early :]}
        kv.close()
    assert all_ranks(ok)


@either_mpi
@only_on(1, 2, 3, 4)
@pytest.mark.parametrize("servers", [0, 1])
def test_the_benchmark_measures_every_strategy(servers: int, tmp_path: Path) -> None:
    """All ranks run it; rank 0 writes strategies with predictions, measurements and what was hidden."""
    if WORLD.size <= servers:
        pytest.skip("needs a worker beside the server")
    out = tmp_path / "bench.json"
    words = ["--servers", str(servers), "--layers", "3", "--kilobytes", "1", "--iterations", "1", "--repeats", "1"]
    words += ["--topk", "0.5"] if servers else ["--setting", "hidden"]
    result = CliRunner().invoke(bench.command, [*words, "--json", str(out)])
    ok = result.exit_code == 0
    if WORLD.rank == 0 and ok:
        rows = json.loads(out.read_text())["strategies"]
        ok = {row["pushes"] for row in rows} == ({"dense", "top-0.5"} if servers else {"dense"})
        ok &= all(row["measured_s"] > 0 < row["predicted_s"] and 0 <= row["measured_hidden"] <= 1 for row in rows)
        optimal = {row["pushes"]: row["predicted_s"] for row in rows if row["strategy"] == "optimal"}
        ok &= all(optimal[row["pushes"]] <= row["predicted_s"] + 1e-12 for row in rows if "both" not in row["strategy"])
    assert all_ranks(ok), result.output


@pytest.mark.core(1)
@pytest.mark.skipif(WORLD.size != 1, reason="starts a job of its own; once is enough")
@pytest.mark.parametrize("servers", [0, 1])
def test_serialized_threads_suffice(tmp_path: Path, servers: int) -> None:
    """Training with overlap, plans looked at again, in a job whose MPI allows one thread at a time."""
    script = f"""
import numpy as np, mpips
from mpi4py import MPI
from mpips.overlap import Overlapped
from mpips.optimizers import SGD
from mpips.mlp import MLP
assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
kv = mpips.create("dist_sync", servers={servers})
exchange = Overlapped(MLP([6, 9, 5, 3], loss="softmax"), kv, SGD(learning_rate=0.1), review_every=2)
rng = np.random.default_rng(kv.rank)
for _ in range(7):
    exchange.step(rng.normal(size=(4, 6)).astype(np.float32), rng.integers(3, size=4))
exchange.finish()
kv.close()
if kv.rank == 0:
    print("trained")
"""
    done = job(tmp_path, script, f"-w 2 -s {servers}", MPI4PY_RC_THREAD_LEVEL="serialized")
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
