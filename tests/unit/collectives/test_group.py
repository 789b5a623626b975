"""Many unlike arrays in one call, with the ranks of a node in one process: `collectives.group`."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.group import PACKED_BYTES, compile_group
from collectives.node import arena
from collectives.tuner import table
from tests.unit.collectives import node

LISTS = {
    "none": [],
    "empty ones": [(0, "f8"), (0, "i4")],
    "one": [(3, "f8")],
    "unlike": [(3, "f8"), (0, "f4"), (5, "i8"), (7, "f4"), (1, "f8"), (2, "i8")],
    "large": [(PACKED_BYTES // 8 + 1, "f8"), (3, "f8"), (PACKED_BYTES, "f4"), (2, "i4")],
    "large alone": [(PACKED_BYTES, "f8"), (PACKED_BYTES, "i8")],
}


def homes(size, reachable):
    known = table.load()
    for board in node.boards(size, reachable):
        yield SimpleNamespace(board=board, rank=board.rank, size=size, nodes=1, table=known)


def arrays_of(shapes, allocate=np.empty):
    made = [allocate(n, dtype) for n, dtype in shapes]
    for number, array in enumerate(made):
        array[...] = np.arange(array.size) % 100 + number
    return made


@pytest.mark.parametrize("reachable", [True, False])
@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("size", [1, 3])
def test_each_array_is_summed_across_ranks(size, name, beside, reachable):
    shapes = LISTS[name]

    def work(home):
        allocate = arena.empty if home.rank == 1 else np.empty
        x = arrays_of(shapes, allocate)
        out = [np.zeros_like(one) for one in x] if beside else None
        _, runner = compile_group(home, x, "sum", "auto", out)
        for turn in range(3):
            for one, fresh in zip(x, arrays_of(shapes)):
                one[...] = fresh * (home.rank + 1 + turn)
            node.run(home.board, runner)
            factor = sum(rank + 1 + turn for rank in range(size))
            for one, fresh in zip(out or x, arrays_of(shapes)):
                assert np.array_equal(one, fresh * factor)
            if beside:
                assert all(np.array_equal(one, fresh * (home.rank + 1 + turn)) for one, fresh in
                           zip(x, arrays_of(shapes)))  # fmt: skip

    assert node.together(*(partial(work, home) for home in homes(size, reachable))) == [None] * size


def test_other_lists_are_refused_on_all_ranks():
    def work(home):
        x = arrays_of([(3 + home.rank, "f8"), (2, "f4")])
        _, runner = compile_group(home, x, "sum", "auto", None)
        node.run(home.board, runner)

    told = node.together(*(partial(work, home) for home in homes(2, True)))
    assert {type(error) for error in told} == {collectives.MismatchError} and str(told[0]) == str(told[1])


@pytest.mark.parametrize(
    "x, out, words",
    [
        ([np.ones(3)], [], "give as many of each"),
        ([np.ones(3)], [np.ones(4)], "same size and type"),
        ([np.ones(3), np.ones(2, complex)], None, "complex"),
        ([np.ones(3), np.ones((4, 4))[:, :2]], None, r"arrays\[1\]"),
        ([np.ones(3), 3], None, r"arrays\[1\]"),
    ],
)
def test_bad_arguments_are_named(x, out, words):
    with pytest.raises((ValueError, TypeError), match=words):
        collectives.grouped_allreduce(x, MPI.COMM_SELF, out=out)


def test_the_result_is_a_list_of_what_was_passed():
    x = (np.ones((2, 2)), np.ones(0, np.int8))
    done = collectives.grouped_allreduce(x, MPI.COMM_SELF, op="sum")
    assert isinstance(done, list) and all(one is other for one, other in zip(done, x))
    out = [np.zeros((2, 2)), np.ones(0, np.int8)]
    assert collectives.grouped_allreduce(x, MPI.COMM_SELF, out=out)[0] is out[0] and (out[0] == 1).all()


def test_the_mean_of_integers_is_refused_before_anything_is_done():
    x = [np.ones(3), np.ones(3, np.int32)]
    with pytest.raises(ValueError, match="divide"):
        collectives.grouped_allreduce(x, MPI.COMM_SELF, op="mean")
    assert collectives.grouped_allreduce([x[0]], MPI.COMM_SELF, op="mean")[0] is x[0]
