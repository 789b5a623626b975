"""Data reach every rank whole, in each of the ways; bad data are refused by all ranks in the same words."""

import numpy as np
import pytest
from mpi4py import MPI

from mpips.parallel import Grid, TrainingError, load
from mpips.parallel.grid import factorings
from mpips.parallel.sources import ArraySource, SyntheticSource
from mpips.parallel.text import TextSource

from .support import COMM, same_everywhere


def shared_path(tmp_path_factory, name):
    """One path for all ranks, rank 0's."""
    folder = str(tmp_path_factory.mktemp("data")) if COMM.rank == 0 else ""
    return f"{COMM.bcast(folder)}/{name}"


@pytest.mark.parametrize("way", ["read", "scatter", "broadcast"])
def test_every_way_brings_the_same_rows(way):
    def only_at_rank_0():
        if way != "read" and COMM.rank:
            raise TrainingError("no such file here")
        return SyntheticSource(501, 6, 2)

    ok = []
    for batch, model in factorings(COMM.size):
        grid = Grid(batch, model)
        data = load(only_at_rank_0, grid, 60, "float64", seed=2, way=way)
        table = SyntheticSource(501, 6, 2).read(np.arange(501))
        x = data.x * data.scaling.x_std + data.scaling.x_mean
        y = data.y * data.scaling.y_std + data.scaling.y_mean
        ok.append(np.allclose(x, table[data.deal.train, :6]) and np.allclose(y, table[data.deal.train, 6:]))
        rows = np.zeros(501)
        rows[data.deal.train] += 1
        rows[data.deal.test] += 1
        grid.batch_comm.Allreduce(MPI.IN_PLACE, rows)
        ok.append((rows == 1).all() and data.train_rows == 401 and data.test_rows == 100)
        grid.free()
    assert same_everywhere(all(ok)), ok


def test_auto_sends_rows_where_only_rank_0_can_read_them():
    def only_at_rank_0():
        if COMM.rank:
            raise TrainingError("no such file here")
        return SyntheticSource(100, 3, 1)

    grid = Grid(COMM.size, 1)
    data = load(only_at_rank_0, grid, 10, way="auto")
    everywhere = load(lambda: SyntheticSource(100, 3, 1), grid, 10, way="auto")
    grid.free()
    assert same_everywhere(np.array_equal(data.x, everywhere.x))
    assert same_everywhere(everywhere.way == "read")
    assert same_everywhere(data.way == ("read" if COMM.size == 1 else data.way))
    assert same_everywhere(COMM.size == 1 or data.way in ("scatter", "broadcast"))


@pytest.mark.parametrize("way", ["read", "scatter", "broadcast"])
@pytest.mark.parametrize(
    "line, words",
    [
        ("1,2", "line 31: 2 columns where the first line has 3"),
        ("1,,3", "line 31: column 2 is missing"),
        ("1,2,", "line 31: column 3 is missing"),
        ("1,two,3", "line 31: column 2 is 'two'"),
        ("1,2,nan", "line 31: column 3 is 'nan'"),
    ],
)
def test_one_bad_line_is_named_on_every_rank(tmp_path_factory, way, line, words):
    path = shared_path(tmp_path_factory, "table.csv")
    if COMM.rank == 0:
        lines = [f"{row},{row % 7},{row % 5}" for row in range(60)]
        lines[30] = line
        with open(path, "w") as file:
            file.write("\n".join(lines))
    COMM.Barrier()
    grid = Grid(COMM.size, 1)
    message = ""
    try:
        load(lambda: TextSource(path), grid, 10, way=way)
    except TrainingError as error:
        message = str(error)
    grid.free()
    assert same_everywhere(words in message), message
    assert len(set(COMM.allgather(message))) == 1


def test_a_file_that_is_not_there_is_named_on_every_rank():
    grid = Grid(1, COMM.size)
    with pytest.raises(TrainingError, match=r"nowhere\.csv does not exist"):
        load(lambda: TextSource("nowhere.csv"), grid, 10)
    grid.free()


@pytest.mark.parametrize(
    "arguments, words",
    [({"batch": 0}, "at least 1"), ({"test_share": 1.0}, "less than 1"), ({"way": "carry"}, "choose auto")],
)
def test_wrong_options_are_refused(arguments, words):
    grid = Grid(COMM.size, 1)
    with pytest.raises(TrainingError, match=words):
        load(lambda: SyntheticSource(10, 2, 1), grid, **{"batch": 5, **arguments})
    grid.free()


def test_labels_must_be_class_numbers_and_their_count_is_found_over_all_ranks():
    x = np.random.default_rng(0).standard_normal((50, 2))
    y = np.arange(50) % 4
    grid = Grid(COMM.size, 1)
    data = load(lambda: ArraySource("labels", x, y, classes=0), grid, 10)
    with pytest.raises(TrainingError, match="is not a class number"):
        load(lambda: ArraySource("labels", x, np.where(y == 3, 2.5, y), classes=0), grid, 10)
    grid.free()
    assert same_everywhere(data.outputs == 4 and data.classes)
