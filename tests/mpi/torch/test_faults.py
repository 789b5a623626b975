"""What fails on one rank in the middle of training is heard by all, soon; and every program ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from io import BytesIO

import pytest
import torch

import collectives
import mpips.torch
from tests import child
from tests.mpi.collectives.fault_table import NOT_DONE, ROOT, Place
from tests.mpi.sizes import only_on
from tests.mpi.torch.support import WORLD, batch, dist, groups, network, nn, train

MODULE = "tests.mpi.torch.test_faults"
RANKS, ODD, STEP, LIMIT = 3, 1, 5, 60
PLACE = Place(sys.executable, "", MODULE, (RANKS, RANKS))
HEARD_SECONDS = 3.0
"""A second is promised; the machine may be busy."""
WRAPS = ("ddp", "DataParallel")
FAULTS = {"kill": "rank 1", "sys.exit": "rank 1", "caught": "rank 1", "shape": "7 float32"}
"""What happens on one rank, and what the others' sentence names. "caught": it leaves its loop by an exception, then
the group."""
ENDS = {"exception": "RuntimeError on rank 1", "interrupt": "interrupted on rank 1"}
"""What nobody catches, and what the job says when it ends for all."""


def program(wrap: str, fault: str) -> None:
    """One rank: it trains until something fails, and tells when, and what it has heard."""
    with groups():
        model = nn.parallel.DistributedDataParallel(network()) if wrap == "ddp" else mpips.torch.DataParallel(network())
        steps = [0]

        def after() -> None:
            steps[0] += 1
            if WORLD.rank == ODD and steps[0] == STEP:
                say(fault=time.monotonic())
                happen(fault, wrap)

        try:
            train(model, torch.optim.SGD(model.parameters(), 0.01), 10**9, batch, after)
        except (Exception, KeyboardInterrupt) as error:
            say(heard=WORLD.rank, at=time.monotonic(), sentence=f"{type(error).__name__}: {error}")
            if fault == "caught" and WORLD.rank == ODD:
                return
            raise


def happen(fault: str, wrap: str) -> None:
    """The fault, on the odd rank."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "sys.exit":
        sys.exit(4)
    if fault in ("caught", "exception"):
        raise RuntimeError("a bug of the user's")
    if fault == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    if fault == "shape":  # on the communicator of the gradients
        (dist.all_reduce if wrap == "ddp" else collectives.allreduce)(torch.ones(7))


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


@only_on(1)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_all_hear_of_a_fault(wrap: str, fault: str) -> None:
    check_heard(*PLACE.run([wrap, fault], LIMIT, survive=fault == "kill"), FAULTS[fault])


@only_on(1)
@pytest.mark.skipif(PLACE.launcher.flavour == "mpich", reason="a death ends every job of this MPI")
@pytest.mark.parametrize("wrap", WRAPS)
def test_the_others_end_by_themselves_where_mpi_lets_them_live(wrap: str) -> None:
    start = [sys.executable, "-m", "launch.cli", "run", "-w", str(RANKS), "--spares", "0", "-m", MODULE, wrap, "kill"]
    said = BytesIO()
    code = child.run(start, LIMIT, ROOT, said)
    check_heard(code, said.getvalue().decode(errors="replace"), FAULTS["kill"])


def check_heard(code: int, said: str, words: str) -> None:
    """See that all other ranks have heard of the fault soon, by this sentence, and that the job has ended badly."""
    assert code and NOT_DONE not in said and "left behind" not in said, said[-3000:]
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    moment = next(line["fault"] for line in lines if "fault" in line)
    heard = {line["heard"]: line for line in lines if line.get("heard", ODD) != ODD}
    assert len(heard) == RANKS - 1, said[-3000:]
    for line in heard.values():
        assert words in line["sentence"] and line["at"] - moment < HEARD_SECONDS, line


@only_on(1)
@pytest.mark.parametrize(("wrap", "fault"), zip(WRAPS, ENDS))
def test_what_nobody_catches_ends_the_job(wrap: str, fault: str) -> None:
    code, said = PLACE.run([wrap, fault], LIMIT)
    assert NOT_DONE not in said and "left behind" not in said, said[-2000:]
    assert code and ENDS[fault] in said, said[-2000:]


if __name__ == "__main__":
    program(*sys.argv[1:])
