"""Run pytest as one rank of a test run. The output of all ranks except rank 0 goes to files.

mpirun -n P python -m tests.rank FOLDER SECONDS [PYTEST WORDS]

Rank r writes its report to FOLDER/r.xml, the name of the running test to FOLDER/r.now, and its output to FOLDER/r.log
(rank 0: to the terminal). If a rank crashes, or if it has not finished after SECONDS or after the time limit of a test,
its stacks are in FOLDER/r.stack.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path

import pytest

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
# a rank writes its stacks this many seconds before the time limit
MARGIN = 5


class Where:
    """A pytest plugin that writes the running test and, shortly before a time limit, all stacks to files.

    They are needed if ranks wait for each other. Then the first rank whose test exceeds its limit ends the job, and
    pytest prints the stacks of this rank. But usually another rank is the cause. So all ranks write their stacks
    before.
    """

    def __init__(self, place: Path, stack: int, seconds: float) -> None:
        self._file = os.open(place, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        self._stack = stack
        self._end = time.monotonic() + seconds
        self._write_stacks_in(seconds)

    def pytest_configure(self, config: pytest.Config) -> None:
        self._limit = float(config.getini("timeout"))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.ftruncate(self._file, os.pwrite(self._file, nodeid.encode(), 0))
        os.ftruncate(self._stack, 0)
        self._write_stacks_in(min(self._limit, self._end - time.monotonic()))

    def _write_stacks_in(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(max(1, seconds - MARGIN), file=self._stack)


def main(folder: Path, seconds: float, words: list[str]) -> int:
    """Run pytest, and return its exit code."""
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
    if rank:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    stack = os.open(folder / f"{rank}.stack", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o644)
    faulthandler.enable(stack)
    # hypothesis is slow to import, and not used in MPI tests. The faulthandler plugin would cancel ours when a test
    # fails.
    without = ("hypothesispytest", "faulthandler")
    settings = ["-q", "-rfE", "--color=no", "--with-mpi", *(word for name in without for word in ("-p", f"no:{name}"))]
    settings.append(f"--junitxml={folder / f'{rank}.xml'}")
    return int(pytest.main([*settings, *words], plugins=[Where(folder / f"{rank}.now", stack, seconds)]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
