"""The program of each rank for `examples.reproduce.torch.pytorch_tests`.

python -m examples.reproduce.torch.pytorch_tests_ranks BACKEND LINES SECONDS AFTER WORD FILE
Rank 0 appends a line to the file LINES when a test begins and when it has ended: [name, outcome, why], as JSON. Tests
up to the one named AFTER are skipped, and so are tests without WORD in their names. If FILE is not "", it is a test
file of PyTorch in which each test starts its own processes: here the ranks are these processes.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import sys
import traceback
import types
import unittest
from pathlib import Path
from typing import Any

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
BACKEND, LINES, SECONDS, AFTER, WORD, FILE = sys.argv[1:]
# By BACKEND, PyTorch chooses the tests that it has for gloo.
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD.size), "RANK": str(WORLD.rank)}
for folder in ("barrier", "test_dir", "init_dir"):
    Path(os.environ["TEMP_DIR"], folder).mkdir(exist_ok=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.testing._internal.distributed.distributed_test as theirs  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase  # noqa: E402
from torch.testing._internal.common_utils import TestCase, set_rng_seed  # noqa: E402

import mpips.torch  # noqa: E402, F401

# Tests that need the real name of the backend. The others are told that it is gloo: by that name they know how the
# backend treats CPU tensors.
NAMED = ("test_get_backend", "test_barrier_timeout_global")
SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
# With "mpi", PyTorch also runs tests of subgroups on fewer than 8 ranks.
os.environ["BACKEND"] = "mpi"


class Case(theirs.DistributedTest._DistTestBase, TestCase):
    """One rank's part of a test."""

    rank, world_size, init_method, file_name = WORLD.rank, WORLD.size, "env://", ""

    def __getattr__(self, name: str) -> Any:
        member = getattr(theirs.TestDistBackend, name)
        return types.MethodType(member, self) if callable(member) else member


def load_case(path: str) -> type[TestCase]:
    """Return the class of a test file whose tests are for gloo, for one rank's part on BACKEND."""
    spec = importlib.util.spec_from_file_location("their_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cases = [
        each for each in vars(module).values() if isinstance(each, type) and issubclass(each, MultiProcessTestCase)
    ]
    found = next(each for each in cases if getattr(each, "backend_name", "") == "gloo")
    return type("Case", (found,), {"backend_name": BACKEND, "rank": WORLD.rank})


CASE: type[TestCase] = load_case(FILE) if FILE else Case


def run_test(name: str) -> tuple[str, str]:
    """Run a test on this rank. Return its outcome ("passed", "skipped", "failed") and the reason."""
    case: Any = CASE(name)
    if FILE:
        case.file_name = f"{os.environ['TEMP_DIR']}/{name}"
    else:
        theirs.BACKEND = BACKEND if name in NAMED else "gloo"
        dist.init_process_group(BACKEND)
        if WORLD.rank == 0:
            theirs.Barrier.init()
        theirs.Barrier.barrier_id = 0
    set_rng_seed(1234)
    WORLD.Barrier()
    try:
        getattr(case, name)()
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as end:
        return ("skipped", SKIPS[end.code]) if end.code in SKIPS else ("failed", f"exit code {end.code}")
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).partition("\n")[0]
        return "failed", f"{type(error).__name__}: {said} ({Path(where.filename).name}:{where.lineno})"
    return "passed", ""


def note(*words: str) -> None:
    """Append a line to LINES, on rank 0."""
    if WORLD.rank == 0:
        with Path(LINES).open("a") as file:
            file.write(json.dumps(words) + "\n")


def main() -> None:
    """Run the tests, one after another."""
    torch.set_num_threads(1)
    for name in unittest.TestLoader().getTestCaseNames(CASE):
        if name <= AFTER or WORD not in name:
            continue
        # If the job ends within this test, this line remains its last.
        note(name, "failed", f"hangs, or ends the job, within {SECONDS} s")
        faulthandler.dump_traceback_later(float(SECONDS), exit=True)
        outcomes = WORLD.allgather(run_test(name))
        note(name, *next((outcome for outcome in outcomes if outcome[0] == "failed"), outcomes[0]))
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
