"""What every MPI test gets: the `mpi` marker, and one verdict, so that one rank's failure is everybody's."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from tests.gpu.arrays import gpu_xp, xp  # noqa: F401

PATIENCE = 60.0  # seconds to wait for ranks that are still in the test after this one has failed or passed
SOON = 0.005  # seconds in which the others mostly come: until then a rank only yields its core
VERDICTS = MPI.COMM_WORLD.Dup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/mpi" in item.path.as_posix():
            item.add_marker("mpi")


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, None]:
    """Ranks meet after each test: where one failed, all fail; a job whose ranks do not meet is ended."""
    outcome = yield
    error = outcome.excinfo[1] if outcome.excinfo else None
    failed = error is not None and not isinstance(error, pytest.skip.Exception)
    verdicts = np.zeros(VERDICTS.size, dtype=np.int8)
    request = VERDICTS.Iallgather(np.full(1, failed, dtype=np.int8), verdicts)
    start = time.monotonic()
    while not request.Test():
        waited = time.monotonic() - start
        if waited > PATIENCE:
            _give_up(pyfuncitem, error)
        os.sched_yield() if waited < SOON else time.sleep(0.0005)
    if verdicts.any() and not failed:
        ranks = ", ".join(map(str, np.flatnonzero(verdicts)))
        verdict = f"failed on rank {ranks}; passed on rank {VERDICTS.rank}"
        outcome.force_exception(pytest.fail.Exception(verdict, pytrace=False))


def _give_up(test: pytest.Function, error: BaseException | None) -> None:
    """The other ranks are stuck in the test: says where, and ends the job."""
    what = "failed with " + "".join(traceback.format_exception(error)).strip() if error else "passed"
    said = f"\nrank {VERDICTS.rank}: {test.nodeid} {what}; other ranks are still in it after {PATIENCE:g} s\n"
    capture = test.config.pluginmanager.getplugin("capturemanager")
    if capture is not None:  # else pytest keeps it, and the job ends before anybody reads it
        capture.suspend_global_capture(in_=True)
    os.write(2, said.encode())
    VERDICTS.Abort(1)
