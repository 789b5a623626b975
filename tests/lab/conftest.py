"""Labs for tests, each with a name of its own; skipped, with the reason, where a lab or an MPI cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path

import pytest

from collectives.simulator.topology import parse
from launch import LauncherError, find
from launch.lab import client
from launch.lab.kernel import find_missing
from launch.lab.layout import lay_out

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 180  # seconds for a job
_numbers = count()

Run = Callable[..., subprocess.CompletedProcess[str]]


@cache
def obstacle() -> str:
    """Why no lab can be made here; empty where one can."""
    return "; ".join(find_missing())


@pytest.fixture(autouse=True)
def possible() -> None:
    if obstacle():
        pytest.skip(obstacle())


@pytest.fixture
def make() -> Iterator[Callable[[str, float], str]]:
    """Makes labs, ``make("star:3", 12.5e6)``, and ends them with the test."""
    with ExitStack() as labs:

        def up(topology: str, rate: float = 12.5e6) -> str:
            name = f"test-{os.getpid()}-{next(_numbers)}"
            return labs.enter_context(client.lab(name, lay_out(parse(topology, rate))))

        yield up


@pytest.fixture
def run() -> Run:
    """Runs a Python program on the ranks of a lab: ``run(name, ranks, code, per_host=1)``."""
    try:
        find()
    except LauncherError as error:
        pytest.skip(str(error))

    def job(name: str, ranks: int, code: str, per_host: int = 1) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "mpi4py", "-c", code]
        argv = client.job_command(name, ranks, program, per_host=per_host)
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)

    return job
