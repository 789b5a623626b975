"""`check_finite`: the first push of NaN or infinity is refused, and all hear which rank, key, push and step it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpips

WORLD = MPI.COMM_WORLD
ODD = WORLD.size - 1


def heard(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", ml_dtypes.bfloat16])
@pytest.mark.parametrize("way", ["push", "pushpull", "ipush", "list"])
def test_all_ranks_hear_of_the_first_push_that_is_not_finite(way: str, dtype: Any) -> None:
    kv = mpips.create("mpi_sync", check_finite=True)
    kv.init(["v", "w"], [np.zeros((3, 4), dtype)] * 2)
    gradient, fine = np.ones((3, 4), dtype), np.ones((3, 4), dtype)
    calls: dict[str, Callable[[], Any]] = {
        "push": lambda: kv.push("w", gradient),
        "pushpull": lambda: kv.pushpull("w", gradient, np.empty_like(gradient)),
        "ipush": lambda: kv.ipush("w", gradient).wait(),
        "list": lambda: kv.push(["v", "w"], [fine, gradient]),
    }
    first = heard(calls[way])
    mpips.note(step=31)
    WORLD.Barrier()  # the error ends for all what is still under way
    if WORLD.rank == ODD:
        gradient[1, 2], gradient[2, 0] = np.inf, np.nan
    second = heard(calls[way])
    heard(kv.close)
    said = WORLD.allgather((first, second))
    assert all(one[0] == "" for one in said), said
    assert all(
        f"push 2 of rank {ODD} holds 1 NaN and 1 infinities among 12 elements, the first at [1, 2]" in one[1]
        and "(the step noted last is 31)" in one[1]
        and "of key 'w'" in one[1]
        for one in said
    ), said


def test_rows_of_a_sparse_push_are_named_by_their_numbers() -> None:
    kv = mpips.create("dist_sync", check_finite=True)
    kv.init("w", np.zeros((9, 2), np.float32))
    values = np.full((2, 2), np.nan if WORLD.rank == ODD else 1, np.float32)
    said = WORLD.allgather(heard(lambda: kv.push("w", mpips.RowSparse(np.array([5, 7]), values, (9, 2)))))
    heard(kv.close)
    assert all(f"rank {ODD} holds 4 NaN" in one and "the first at [5, 0]" in one for one in said), said


def test_numbers_that_are_finite_and_integers_go_through() -> None:
    kv = mpips.create("mpi_sync", check_finite=True)
    kv.init(["w", "n"], [np.zeros(3, np.float16), np.zeros(3, np.int64)])
    out, counts = np.empty(3, np.float16), np.empty(3, np.int64)
    kv.pushpull("w", np.full(3, 60000 / WORLD.size, np.float16), out)  # a sum of these overflows in float16
    kv.pushpull("n", np.arange(3), counts)
    kv.close()
    assert all(WORLD.allgather(bool(np.isfinite(out).all()) and counts.tolist() == [0, WORLD.size, 2 * WORLD.size]))
