"""What a call of many unlike arrays takes and gives: `grouped_allreduce` of one process."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import collectives


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
