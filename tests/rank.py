"""What each rank of a test run executes: pytest, with the output of all ranks but the first in files.

mpirun -n P python -m tests.rank FOLDER SECONDS [PYTEST WORDS]

The report of rank r is FOLDER/r.xml, the test that it is in FOLDER/r.now, its output FOLDER/r.log (rank 0: the
terminal). A rank that crashes, or is not done after SECONDS or after the limit of a test, leaves where it was in
FOLDER/r.stack.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from pathlib import Path

import pytest

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
MARGIN = 5  # seconds before the end in which to say where a rank is


class Where:
    """Keeps the name of the running test in a file, for the case that this process does not come to its end.

    Where ranks wait for each other, the first whose test exceeds its limit ends the job, and pytest says where that one
    was. The rank that holds up the others is seldom the same one, so all write where they are a little earlier.
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
    """Runs pytest and returns its exit code."""
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
    if rank:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    stack = os.open(folder / f"{rank}.stack", os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND, 0o644)
    faulthandler.enable(stack)
    without = ("hypothesispytest", "faulthandler")  # slow to import, not used here; cancels ours when a test fails
    settings = ["-q", "-rfE", "--color=no", "--with-mpi", *(word for name in without for word in ("-p", f"no:{name}"))]
    settings.append(f"--junitxml={folder / f'{rank}.xml'}")
    return int(pytest.main([*settings, *words], plugins=[Where(folder / f"{rank}.now", stack, seconds)]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
