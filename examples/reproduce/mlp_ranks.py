"""What each host runs for `examples.reproduce.mlp_lab`: for each case every grid, predicted, then trained for a while.

python -m examples.reproduce.mlp_ranks REQUEST ANSWER
REQUEST holds {"cases": [{"name", "hidden", "batch"}], "steps": S}; networks are 16-hidden-2, float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.optimizers import SGD
from mpips.parallel.grid import Grid
from mpips.parallel.hybrid import Hybrid
from mpips.parallel.mlp import MLP
from mpips.parallel.network import Specification
from mpips.parallel.predict import predict_all
from mpips.parallel.slices import interval

OPTIMIZER = SGD(learning_rate=1e-3)


def case(comm: MPI.Comm, hidden: list[int], batch: int, steps: int) -> list[dict[str, Any]]:
    """Every grid: predicted before anything is trained, and the median step of its slowest rank, s."""
    specification = Specification((16, *hidden, 2), "relu", "l2", "float32", 1)
    rows = []
    for each in predict_all(specification, batch, comm, OPTIMIZER):
        grid = Grid(each.batch, each.model, comm)
        seconds = trained(grid, specification, batch, steps)
        grid.free()
        rows.append({**each._asdict(), "predicted": each.seconds, "measured": seconds})
    return rows


def trained(grid: Grid, specification: Specification, batch: int, steps: int) -> float:
    """Median seconds of a step on `batch` samples, of which this rank holds its batch index's."""
    hybrid = Hybrid(MLP(*specification), grid, OPTIMIZER)
    start, stop = interval(batch, grid.batch, grid.batch_index)
    rng = np.random.default_rng(grid.batch_index)
    x = rng.standard_normal((stop - start, specification.sizes[0]), dtype=np.float32)
    y = rng.standard_normal((stop - start, specification.sizes[-1]), dtype=np.float32)
    times = np.empty(steps)
    hybrid.step(x, y, batch)
    for index in range(steps):
        grid.comm.Barrier()
        begin = perf_counter()
        hybrid.step(x, y, batch)
        times[index] = perf_counter() - begin
    grid.comm.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    return float(np.median(times))


def main(request: Path, answer: Path) -> None:
    comm = MPI.COMM_WORLD
    asked = msgspec.json.decode(request.read_bytes())
    found = {each["name"]: case(comm, each["hidden"], each["batch"], asked["steps"]) for each in asked["cases"]}
    if comm.rank == 0:
        answer.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
