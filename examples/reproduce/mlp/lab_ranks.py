"""The program of each host for `examples.reproduce.mlp.lab`: predicts and times training steps on meshes.

python -m examples.reproduce.mlp.lab_ranks REQUEST ANSWER
REQUEST holds {"cases": [{"name", "hidden", "batch"}], "comparisons": [{"name", "hidden", "batch", "grid"}],
"steps": S}.

In a case, a step on every mesh is predicted and then timed, in float32. In a comparison there is one mesh, and its
steps with and without overlap and mixed precision are timed in turn. Networks are 16-hidden-2.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.benchmark.harness import measure
from examples.reproduce import rank
from mpips.mlp import MLP
from mpips.mlp.clock import hidden_share
from mpips.mlp.mesh import Mesh
from mpips.mlp.network import Specification, interval
from mpips.mlp.prediction import predict, predict_all
from mpips.mlp.training import Worker
from mpips.optimizers import SGD

OPTIMIZER = SGD(learning_rate=1e-3)


def case(comm: MPI.Comm, hidden: list[int], batch: int, steps: int) -> list[dict[str, Any]]:
    """Return a row for every mesh: the predicted seconds of a step, and the measured ones. Collective.

    All meshes are predicted before any is trained.
    """
    specification = Specification((16, *hidden, 2), "relu", "l2", "float32", 1)
    rows = []
    for each in predict_all(specification, batch, comm, OPTIMIZER):
        mesh = Mesh(each.batch, each.model, comm)
        found = in_turn(mesh, [Worker(MLP(*specification), mesh, OPTIMIZER)], batch, steps)[0]
        mesh.free()
        rows.append({**each._asdict(), "predicted": each.seconds, **found._asdict()})
    return rows


def comparison(comm: MPI.Comm, hidden: list[int], batch: int, shape: list[int], steps: int) -> list[dict[str, Any]]:
    """Return a row for each dtype (float32, mixed), without and with overlap, all on one mesh. Collective.

    Predictions are for steps with overlap, which is the default between nodes.
    """
    mesh = Mesh(*shape, comm)
    networks = {dtype: Specification((16, *hidden, 2), "relu", "l2", dtype, 1) for dtype in ("float32", "mixed")}
    predicted = {dtype: predict(each, batch, mesh, OPTIMIZER).seconds for dtype, each in networks.items()}
    ways = [(dtype, overlap) for dtype in networks for overlap in (False, True)]
    workers = [Worker(MLP(*networks[dtype]), mesh, OPTIMIZER, overlap=overlap) for dtype, overlap in ways]
    found = in_turn(mesh, workers, batch, steps)
    mesh.free()
    return [
        {"dtype": dtype, "overlap": overlap, "predicted": predicted[dtype] if overlap else None, **each._asdict()}
        for (dtype, overlap), each in zip(ways, found)
    ]


class Measured(NamedTuple):
    """The measurement of a step."""

    # median seconds, of the slowest rank
    measured: float
    # share of communication time hidden behind computation, over all ranks; None if nothing was sent
    measured_hidden: float | None


def in_turn(mesh: Mesh, workers: list[Worker], batch: int, steps: int) -> list[Measured]:
    """Time steps of the workers in turn, with a minibatch of `batch` samples. Collective over the mesh."""
    start, stop = interval(batch, mesh.batch, mesh.batch_index)
    rng = np.random.default_rng(mesh.batch_index)
    x = rng.standard_normal((stop - start, 16), dtype=np.float32)
    y = rng.standard_normal((stop - start, 2), dtype=np.float32)
    for worker in workers:
        worker.step(x, y, batch)
        worker.clock.reset()
    timings = measure(mesh.comm, [partial(worker.step, x, y, batch) for worker in workers], 0.0, steps)
    waits = np.array([(worker.clock.communication(), worker.clock.under_way) for worker in workers])
    mesh.comm.Allreduce(MPI.IN_PLACE, waits, MPI.SUM)
    shares = [hidden_share(waited, under_way) for waited, under_way in waits.tolist()]
    return [Measured(timing.median, share) for timing, share in zip(timings, shares, strict=True)]


def main() -> None:
    comm, asked = MPI.COMM_WORLD, rank.request()
    steps = asked["steps"]
    found = {each["name"]: case(comm, each["hidden"], each["batch"], steps) for each in asked["cases"]}
    for each in asked["comparisons"]:
        found[each["name"]] = comparison(comm, each["hidden"], each["batch"], each["grid"], steps)
    if comm.rank == 0:
        rank.answer(found)


if __name__ == "__main__":
    main()
