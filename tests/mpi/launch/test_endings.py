"""However a rank's program ends, the job ends: with hooks and streams of its own, by MPI.Finalize(), before it has met
the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.choice import first
from tests.mpi.launch.support import run

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")

# Rank 1 fails while rank 0 waits for it: inside MPI, which hears of nothing, or for a store that is open on both.
FAILS = """
import asyncio, io, os, sys, threading
import numpy as np
import mpips
from mpi4py import MPI

class Tee:
    def __init__(self, file): self.file = file
    def write(self, text): return self.file.write(text)

def hook(kind, error, trace):
    os.write(2, f"hooked {{error}}\\n".encode())
    {inside}

error = ValueError("no file")
{before}
kv = mpips.create('dist_sync'); kv.init('w', np.zeros(3))
if MPI.COMM_WORLD.rank == 1:
    {failing}
MPI.COMM_WORLD.recv(source=1, tag=77)
"""
THREAD = "t = threading.Thread(target=lambda: error.nothing); t.start(); t.join(); MPI.COMM_WORLD.recv(source=0)"
SAID = "ValueError: no file"
SET = "sys.excepthook = hook"
# what is set before, what the hook does, how rank 1 fails, what is said
ENDS = {
    "a hook": (SET, "pass", "raise error", ["hooked no file", "ValueError: no file (script.py:"]),
    "no flush": ("sys.stdout, sys.stderr = Tee(sys.stdout), Tee(sys.stderr)", "", "raise error", [SAID]),
    "a hook that raises": (SET, "1 / 0", "raise error", ["ZeroDivisionError", "ValueError: no file (script.py:"]),
    "a hook that exits": (SET, "sys.exit(0)", "raise error", ["hooked no file", "ValueError: no file (script.py:"]),
    "a thread's hook": (
        "threading.excepthook = lambda args: hook(*args[:3])",
        "pass",
        THREAD,
        ["hooked 'ValueError'", "AttributeError: 'ValueError' object has no attribute 'nothing' (script.py:"],
    ),
    "no streams": (
        "sys.stdout = sys.stderr = None; sys.excepthook = sys.__excepthook__",
        "",
        "raise error",
        [f"{SAID} (script.py:"],
    ),
    "closed": ("sys.stdout.close(), sys.stderr.close()", "", "raise error", [SAID]),
    "full": (
        "sys.stdout = open('/dev/full', 'w'); sys.stderr = open('/dev/full', 'w'); print('lost')",
        "",
        "raise error",
        [SAID],
    ),
    "no Exception": ("error = asyncio.CancelledError()", "", "raise error", ["CancelledError on rank 1 of 2"]),
    "a closed buffer": ("sys.stdout = io.StringIO(); sys.stdout.close()", "", "sys.exit(1)", ["exit 1 on rank 1 of 2"]),
}


@pytest.mark.core(2)
@first(4, **{"how, bare": [(how, bare) for how in ENDS for bare in (False, True)[: 1 + (how != "a closed buffer")]]})
def test_a_failed_rank_ends_the_job_whatever_its_program_has_set(tmp_path: Path, how: str, bare: bool) -> None:
    before, inside, failing, said = ENDS[how]
    done = run(tmp_path, FAILS.format(before=before, inside=inside or "pass", failing=failing), "-w", "2", bare=bare)
    assert done.returncode == 1, done.stderr
    for sentence in said:
        assert done.stderr.count(sentence) == 1, done.stderr
    assert "on rank 1 of 2: the job ends" in done.stderr
    assert "mpips/__main__.py" not in done.stderr
    assert bare or "\0" not in done.stderr, done.stderr


FINALIZES = """
import numpy as np
import mpips
from mpi4py import MPI
kv = mpips.create("dist_sync")
kv.init("w", np.zeros(3))
kv.ipushpull("w", np.ones(3))
MPI.Finalize()
print("after it")
"""


@pytest.mark.core(1)
@first(2, **{"servers, bare": [("1", False), ("0", True), ("0", False)]})
def test_a_program_may_end_mpi_itself(tmp_path: Path, servers: str, bare: bool) -> None:
    done = run(tmp_path, FINALIZES, "-w", "2", "-s", servers, bare=bare)
    assert (done.returncode, done.stdout) == (0, "after it\n" * 2), done.stderr


# Rank 0 ends, and rank 1 waits for it in the first call that needs it.
LEAVES = """
import os, sys
os.environ["MPIPS_STALL_SECONDS"] = os.environ["MPIPS_TIMEOUT_SECONDS"] = "0"  # no limit ends it
import numpy as np
from mpi4py import MPI
import collectives, mpips
if MPI.COMM_WORLD.rank == 1:
    {call}
"""
FIRST_CALLS = {
    "collectives.allreduce(np.ones(3))": "the first collective on MPI_COMM_WORLD of 2 ranks",
    "mpips.create('dist_sync')": "mpips.create, to which not all 2 ranks have come",
    "import mpips.horovod.torch as hvd; hvd.init()": "hvd.init",
    "import torch.distributed as dist; dist.init_process_group('mpips')": "init_process_group",
}


@pytest.mark.core(1)
@first(2, call=FIRST_CALLS, bare=[False, True])
def test_a_rank_that_waits_for_one_whose_program_has_ended_hears_so(tmp_path: Path, call: str, bare: bool) -> None:
    if "torch" in call:
        pytest.importorskip("torch")
    done = run(tmp_path, LEAVES.format(call=call), "-w", "2", bare=bare)
    assert done.returncode == 1, done.stderr
    assert f"CollectiveError: {FIRST_CALLS[call]}" in done.stderr
    assert done.stderr.count(": rank 0 is needed, and its program has ended\n") == 1, done.stderr
    if not bare or "collectives" not in call:  # a program of collectives alone keeps Python's own traceback
        assert len(re.findall(r'  File "', done.stderr)) == 1, done.stderr  # the user's line, and none of ours


# Rank 0 ends with a store open, whose end waits for rank 1, which waits for rank 0 elsewhere.
LEAVES_A_STORE = """
import os
os.environ["MPIPS_TIMEOUT_SECONDS"] = "0"  # no limit ends it
import numpy as np
import collectives, mpips
kv = mpips.create("mpi_sync")
kv.init("w", np.zeros(3))
collectives.allreduce(np.ones(3))
if kv.rank == 1:
    collectives.allreduce(np.ones(3))
"""


def test_a_store_that_is_open_holds_nobody_who_waits_elsewhere(tmp_path: Path) -> None:
    done = run(tmp_path, LEAVES_A_STORE, "-w", "2")
    assert done.returncode == 1, done.stderr
    assert "CollectiveError: rank 0 is needed, and its program has ended" in done.stderr
