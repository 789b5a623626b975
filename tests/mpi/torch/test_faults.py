"""What fails on one rank in the middle of training is heard by all, soon, through every wrapper; and programs end."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import pytest

from tests import child
from tests.mpi.collectives.fault_table import NOT_DONE, ROOT, Place
from tests.mpi.sizes import only_on
from tests.mpi.torch.wrapped import NEEDS, ODD, WRAPS

MODULE = "tests.mpi.torch.wrapped"
RANKS, LIMIT = 3, 120
PLACE = Place(sys.executable, "", MODULE, (RANKS, RANKS))
HEARD_SECONDS = 5.0
"""A second is promised; the machine may be busy."""
FAULTS = {"kill": "rank 1", "sys.exit": "rank 1", "caught": "rank 1", "shape": "7 float32"}
"""What happens on one rank, and what the others' sentence names. "caught": it leaves its loop by an exception, then
the group."""
ENDS = {"exception": "RuntimeError on rank 1", "interrupt": "interrupted on rank 1"}
"""What nobody catches, and what the job says when it ends for all."""
ALWAYS = {
    "ddp": (*FAULTS, *ENDS),
    "data_parallel": (*FAULTS, *ENDS),
    "hook": ("sys.exit",),
    "sparse": ("caught",),
    "fsdp": ("shape",),
    "lightning": ("kill", "interrupt"),
    "accelerate": ("caught",),
    "trainer": ("shape", "exception"),
}
"""Faults in each wrapper that `make test-torch` tries; the others are tried by `--full`."""


def cases(faults: dict[str, str]) -> list[Any]:
    """Return wrappers and faults, with their marks."""
    found = []
    for wrap in WRAPS:
        lacking = [name for name in NEEDS.get(wrap, ()) if find_spec(name) is None]
        skip = [pytest.mark.skip(reason=f"it takes {lacking[0]}")] if lacking else []
        for fault in faults:
            marks = skip if fault in ALWAYS[wrap] else [*skip, pytest.mark.full]
            found.append(pytest.param(wrap, fault, marks=marks, id=f"{wrap}-{fault}"))
    return found


@pytest.mark.core(4)
@only_on(1)
@pytest.mark.parametrize(("wrap", "fault"), cases(FAULTS))
def test_all_hear_of_a_fault(wrap: str, fault: str) -> None:
    check_heard(*PLACE.run([wrap, "mpips", fault], LIMIT, survive=fault == "kill"), FAULTS[fault])


@pytest.mark.core(1)
@only_on(1)
@pytest.mark.skipif(PLACE.launcher.flavour == "mpich", reason="a death ends every job of this MPI")
@pytest.mark.parametrize("wrap", ["ddp", "data_parallel"])
def test_the_others_end_by_themselves_where_mpi_lets_them_live(wrap: str) -> None:
    start = [sys.executable, "-m", "launch.cli", "run", "-w", str(RANKS), "--spares", "0", "-m", MODULE]
    said = BytesIO()
    code = child.run([*start, wrap, "mpips", "kill"], LIMIT, ROOT, said)
    check_heard(code, said.getvalue().decode(errors="replace"), FAULTS["kill"])


def check_heard(code: int, said: str, words: str) -> None:
    """See that all other ranks have heard of the fault soon, by this sentence, and that the job has ended badly."""
    assert code and NOT_DONE not in said and "left behind" not in said, said[-3000:]
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"')]
    moment = next(line["fault"] for line in lines if "fault" in line)
    heard = {line["heard"]: line for line in lines if line.get("heard", ODD) != ODD}
    assert len(heard) == RANKS - 1, said[-3000:]
    seconds = max(line["at"] - moment for line in heard.values())
    print(f"heard after {seconds:.2f} s: {heard[0]['sentence']}")
    assert all(words in line["sentence"] for line in heard.values()), heard
    assert seconds < HEARD_SECONDS


@pytest.mark.core(1)
@only_on(1)
@pytest.mark.parametrize(("wrap", "fault"), cases(ENDS))
def test_what_nobody_catches_ends_the_job(wrap: str, fault: str) -> None:
    code, said = PLACE.run([wrap, "mpips", fault], LIMIT)
    assert NOT_DONE not in said and "left behind" not in said, said[-2000:]
    lightning_s = (wrap, fault) == ("lightning", "interrupt")  # it makes an exit code of an interrupt
    assert code and ("exit 1 on rank 1" if lightning_s else ENDS[fault]) in said, said[-2000:]
