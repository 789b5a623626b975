"""A program that ends in any way with operations under way ends; servers, too."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import mpips
from tests.choice import once
from tests.mpi.collectives.fault_table import NOT_DONE, Place
from tests.mpi.mpips.cells import KINDS
from tests.mpi.sizes import only_on

MODULE = "tests.mpi.mpips.test_exits"
FLOATS = 5_000_000
LIMIT = 60
ENDS = {"off the end": {0}, "sys.exit": {0}, "close": {0}, "exit code": {3}, "exception": {1}, "one alone": {1, 3, 0}}
"""Ways to end, and the exit codes that a job may have then (0 of "one alone": all had come to their end before)."""


def program(end: str, kind: str, floats: int) -> None:
    """One rank: a long push that nobody waits for, and the end."""
    name, options = KINDS[kind]
    kv = mpips.create(name, **options)
    x = np.ones(floats, np.float32)
    kv.init("w", x)
    if name.endswith("_async"):
        kv.set_optimizer("sgd", learning_rate=0.0)
    kv.ipushpull("w", x)
    if end == "sys.exit":
        sys.exit(0)
    if end == "exit code":
        sys.exit(3)
    if end == "exception":
        raise RuntimeError("a bug of the user's")
    if end == "one alone" and kv.rank == kv.num_workers - 1:
        raise RuntimeError("a bug of the user's")
    if end == "close":
        kv.close()


@pytest.mark.core(2)
@only_on(1)
@once(kind=KINDS, end=ENDS)
def test_a_program_ends(end, kind):
    code, said = Place(sys.executable, "", MODULE, (3, 4)).run([end, kind, str(FLOATS)], LIMIT)
    assert NOT_DONE not in said and "left behind" not in said and code in ENDS[end], (code, said[-800:])


if __name__ == "__main__":
    program(sys.argv[1], sys.argv[2], int(sys.argv[3]))
