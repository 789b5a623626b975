"""What each host runs for `examples.reproduce.mlp.lab`: for each case every mesh, predicted, then trained for a while;
for each comparison one mesh, its steps with and without overlap and mixed precision in turn.

python -m examples.reproduce.mlp.lab_ranks REQUEST ANSWER
REQUEST holds {"cases": [{"name", "hidden", "batch"}], "comparisons": [{"name", "hidden", "batch", "mesh"}],
"steps": S}; networks are 16-hidden-2, float32 where not said.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from examples.reproduce import rank
from mpips.mlp import MLP
from mpips.mlp.mesh import Mesh
from mpips.mlp.network import Specification, interval
from mpips.mlp.parallel import hidden_share
from mpips.mlp.prediction import predict, predict_all
from mpips.mlp.training import Worker
from mpips.optimizers import SGD

OPTIMIZER = SGD(learning_rate=1e-3)


def case(comm: MPI.Comm, hidden: list[int], batch: int, steps: int) -> list[dict[str, Any]]:
    """Every mesh: predicted before anything is trained, and the median step of its slowest rank, s."""
    specification = Specification((16, *hidden, 2), "relu", "l2", "float32", 1)
    rows = []
    for each in predict_all(specification, batch, comm, OPTIMIZER):
        mesh = Mesh(each.batch, each.model, comm)
        found = in_turn(mesh, [Worker(MLP(*specification), mesh, OPTIMIZER)], batch, steps)[0]
        mesh.free()
        rows.append({**each._asdict(), "predicted": each.seconds, **found._asdict()})
    return rows


def comparison(comm: MPI.Comm, hidden: list[int], batch: int, shape: list[int], steps: int) -> list[dict[str, Any]]:
    """One mesh: without and with overlap, in float32 and mixed; predictions are for overlap, as `auto` takes it."""
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
    """Median seconds of a step, of its slowest rank; and the share of the time that messages took on all ranks for
    which computation did not wait, None where nothing was sent."""

    measured: float
    measured_hidden: float | None


def in_turn(mesh: Mesh, workers: list[Worker], batch: int, steps: int) -> list[Measured]:
    """Steps of each in turn, on `batch` samples, of which this rank holds its batch index's."""
    start, stop = interval(batch, mesh.batch, mesh.batch_index)
    rng = np.random.default_rng(mesh.batch_index)
    x = rng.standard_normal((stop - start, 16), dtype=np.float32)
    y = rng.standard_normal((stop - start, 2), dtype=np.float32)
    times = np.empty((steps, len(workers)))
    for worker in workers:
        worker.step(x, y, batch)
        worker.clock.reset()
    for row in times:
        for index, worker in enumerate(workers):
            mesh.comm.Barrier()
            begin = perf_counter()
            worker.step(x, y, batch)
            row[index] = perf_counter() - begin
    mesh.comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    waits = np.array([(worker.clock.communication(), worker.clock.under_way) for worker in workers])
    mesh.comm.Allreduce(MPI.IN_PLACE, waits, MPI.SUM)
    shares = [hidden_share(waited, under_way) for waited, under_way in waits.tolist()]
    return [Measured(*each) for each in zip(np.median(times, axis=0).tolist(), shares)]


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
