"""PyTorch's own distributed tests, which its wheel ships, on "mpips".

    mpirun -n 3 python -m tests.mpi.torch.pytorch_tests [--only WORD] [--seconds 30] [--json FILE]

Every rank runs the same methods of `DistributedTest._DistTestBase` in the same order, in one process group that is made
anew for each. A method that hangs past its limit, or leaves ranks apart, ends the run: what is left runs in a new job
(`--after NAME`). Rank 0 prints how many pass, are skipped and fail, and why.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
import types
import unittest
from collections import Counter
from pathlib import Path
from typing import Any

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(WORLD.size), "RANK": str(WORLD.rank)}
os.environ["TEMP_DIR"] = WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None)
for folder in ("barrier", "test_dir", "init_dir"):
    Path(os.environ["TEMP_DIR"], folder).mkdir(exist_ok=True)

import torch.distributed as dist  # noqa: E402
import torch.testing._internal.distributed.distributed_test as theirs  # noqa: E402
from torch.testing._internal.common_distributed import TEST_SKIPS  # noqa: E402
from torch.testing._internal.common_utils import TestCase, set_rng_seed  # noqa: E402

import mpips.torch  # noqa: E402, F401

SKIPS = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


class Case(theirs.DistributedTest._DistTestBase, TestCase):
    """One rank's part of a test."""

    rank, world_size, init_method = WORLD.rank, WORLD.size, "env://"

    def __getattr__(self, name: str) -> Any:
        member = getattr(theirs.TestDistBackend, name)
        return types.MethodType(member, self) if callable(member) else member


def run(name: str) -> tuple[str, str]:
    """Its outcome here, and why."""
    case = Case(name)
    case.file_name = ""
    dist.init_process_group("mpips")
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
        return "failed", f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"[:400]
    return "passed", ""


def main() -> int:
    """Run them all; 0 unless one failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--after", default="")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = [name for name in unittest.TestLoader().getTestCaseNames(Case) if arguments.only in name]
    names = [name for name in names if name > arguments.after]
    counts: Counter[str] = Counter()
    found: dict[str, tuple[str, str]] = {}
    for name in names:
        if WORLD.rank == 0:
            os.write(2, f"{name}\n".encode())
        faulthandler.dump_traceback_later(arguments.seconds, exit=True)
        begin = time.monotonic()
        outcome, why = run(name)
        words = WORLD.allgather((outcome, why))
        worst = next((word for word in words if word[0] == "failed"), words[0])
        counts[worst[0]] += 1
        found[name] = worst
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        if WORLD.rank == 0:
            print(f"{worst[0]:8} {time.monotonic() - begin:5.1f} s  {name}  {worst[1]}", flush=True)
    if WORLD.rank == 0:
        print(", ".join(f"{count} {word}" for word, count in counts.items()))
        for why, count in Counter(why for word, why in found.values() if word == "skipped").most_common():
            print(f"  skipped {count}: {why}")
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
