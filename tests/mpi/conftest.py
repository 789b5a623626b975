"""Settings of MPI tests: the mark `mpi`, and a common verdict, so that a test that fails on one rank fails on all."""

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

# seconds to wait for ranks that are still in the test when this rank has finished it
PATIENCE = 60.0
# Most ranks finish within this many seconds of each other. Until then a waiting rank only yields its core.
SOON = 0.005
VERDICTS = MPI.COMM_WORLD.Dup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/mpi" in item.path.as_posix():
            item.add_marker("mpi")


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, None]:
    """After each test, exchange verdicts between ranks. If the test has failed on one rank, it fails on all.

    If a rank does not arrive within `PATIENCE` seconds, the job is ended.
    """
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
    """Print that other ranks are stuck in a test, and end the job."""
    what = "failed with " + "".join(traceback.format_exception(error)).strip() if error else "passed"
    message = f"\nrank {VERDICTS.rank}: {test.nodeid} {what}; other ranks are still in it after {PATIENCE:g} s\n"
    capture = test.config.pluginmanager.getplugin("capturemanager")
    # Stop pytest from capturing the output: the job ends before pytest would print it.
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    os.write(2, message.encode())
    VERDICTS.Abort(1)
