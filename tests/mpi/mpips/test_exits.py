"""A program that ends in any way with operations under way ends; servers, too.

    python -m tests.mpi.mpips.test_exits TIMES [--floats N] [--python PYTHON]

makes every way to end so many times, in every kind of store.
"""

from __future__ import annotations

import argparse
import sys
import time

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


def ended(place: Place, end: str, kind: str, floats: int) -> tuple[str, float]:
    """What is wrong with how such a job ended ("" for nothing), and after how many seconds it did."""
    begun = time.monotonic()
    code, said = place.run([end, kind, str(floats)], LIMIT)
    seconds = time.monotonic() - begun
    if NOT_DONE in said or "left behind" in said:
        return f"hangs: {said[-800:]}", seconds
    if code not in ENDS[end]:
        return f"ended with {code}: {said[-800:]}", seconds
    return "", seconds


@pytest.mark.core(2)
@only_on(1)
@once(kind=KINDS, end=ENDS)
def test_a_program_ends(end, kind):
    assert not ended(Place(sys.executable, "", MODULE, (3, 4)), end, kind, FLOATS)[0]


# ---- as a program


def main() -> int:
    """Command line; the exit code."""
    if sys.argv[1] in ENDS:
        program(sys.argv[1], sys.argv[2], int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description="Ways to end with operations under way.")
    parser.add_argument("times", type=int)
    parser.add_argument("--floats", type=int, default=50_000_000)
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    place, bad = Place(arguments.python, "", MODULE, (3, 4)), 0
    print(f"{place}, {arguments.floats} floats, seconds of the slowest of {arguments.times}")
    for end in ENDS:
        for kind in KINDS:
            found = [ended(place, end, kind, arguments.floats) for _ in range(arguments.times)]
            wrong = [words for words, _ in found if words]
            bad += len(wrong)
            print(f"{end:12} {kind:12} {max(seconds for _, seconds in found):6.1f} {len(wrong)} wrong", flush=True)
            if wrong:
                print(wrong[0], flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
