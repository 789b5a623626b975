"""A checkpoint of one grid is read on another, and training goes on as if it had never stopped."""

import numpy as np
import pytest

from mpips.optimizers import Adam
from mpips.parallel import MLP, Grid, TrainingError, collect, load, load_checkpoint, save_checkpoint, train
from mpips.parallel.grid import factorings
from mpips.parallel.sources import SyntheticSource
from tests.mpi.sizes import either_mpi

from .support import COMM, GRIDS, alone, curve, same_everywhere

pytestmark = GRIDS

SIZES = [5, 11, 7, 9, 2]


def fresh(grid, epochs, hybrid=None, mode="pairs"):
    data = load(lambda: SyntheticSource(150, 5, 2), grid, 30, "float64", seed=1)
    return train(MLP(SIZES, dtype="float64", seed=3), data, grid, epochs, Adam(learning_rate=0.01), mode, hybrid=hybrid)


@either_mpi
@pytest.mark.parametrize("mode", ["pairs", "columns"])
def test_training_goes_on_on_another_grid(tmp_path_factory, mode):
    folder = COMM.bcast(str(tmp_path_factory.mktemp("checkpoint")) if COMM.rank == 0 else "")
    expected = curve(fresh(alone(), 4))
    grids = factorings(COMM.size)
    ok = []
    for index, shape in enumerate(grids):
        path = f"{folder}/{index}.safetensors"
        written = Grid(*shape)
        first = fresh(written, 2, mode=mode)
        save_checkpoint(path, first.hybrid)
        written.free()
        read = Grid(*grids[-1 - index])
        second = fresh(read, 2, load_checkpoint(path, read, mode), mode)
        read.free()
        got = np.concatenate([curve(first), curve(second)])
        ok.append(np.abs(got - expected).max() <= 1e-10 and [e.epoch for e in second.epochs] == [3, 4])
    assert same_everywhere(all(ok)), ok


@pytest.mark.parametrize("dealt, words", [((2, 0.2), "seed 2 and test share 0.2"), ((1, 0.4), "test share 0.4")])
def test_rows_that_were_dealt_otherwise_are_refused(tmp_path_factory, dealt, words):
    path = COMM.bcast(str(tmp_path_factory.mktemp("dealt")) if COMM.rank == 0 else "") + "/x.safetensors"
    grid = Grid(COMM.size, 1)
    model = MLP([5, 4, 2], dtype="float64", seed=3)
    rows = [load(lambda: SyntheticSource(150, 5, 2), grid, 30, "float64", *each) for each in ((1, 0.2), dealt)]
    first = train(model, rows[0], grid, 1)
    save_checkpoint(path, first.hybrid, rows[0])
    again = load_checkpoint(path, grid)
    with pytest.raises(TrainingError, match=f"{words}, but those of the checkpoint by seed 1 and test share 0.2"):
        train(model, rows[1], grid, 1, hybrid=again)
    assert [epoch.epoch for epoch in train(model, rows[0], grid, 1, hybrid=again).epochs] == [2]
    grid.free()


def test_collect_gives_every_rank_the_whole_network():
    expected = fresh(alone(), 1)
    whole = collect(expected.hybrid)
    ok = []
    for shape in factorings(COMM.size):
        grid = Grid(*shape)
        got = collect(fresh(grid, 1).hybrid)
        grid.free()
        ok.append(np.allclose(got.flat_parameters, whole.flat_parameters, rtol=0, atol=1e-12))
    assert same_everywhere(all(ok)), ok


def test_a_broken_checkpoint_is_refused_on_every_rank(tmp_path_factory):
    path = COMM.bcast(str(tmp_path_factory.mktemp("broken")) if COMM.rank == 0 else "") + "/x.safetensors"
    grid = Grid(COMM.size, 1)
    with pytest.raises(TrainingError, match="cannot be read"):
        load_checkpoint(path, grid)
    if COMM.rank == 0:
        with open(path, "w") as file:
            file.write("not a checkpoint")
    COMM.Barrier()
    with pytest.raises(TrainingError, match="cannot be read"):
        load_checkpoint(path, grid)
    grid.free()
