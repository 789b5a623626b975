"""What each rank of a test run executes: pytest, with the output of all ranks but the first in files.

mpirun -n P python -m tests.rank FOLDER [PYTEST WORDS]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def main(folder: Path, words: list[str]) -> int:
    """Runs pytest; the report of rank r is FOLDER/r.xml, its output FOLDER/r.log (rank 0: the terminal)."""
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
    if rank:
        log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    return int(pytest.main(["-q", "--color=no", "--with-mpi", f"--junitxml={folder / f'{rank}.xml'}", *words]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
