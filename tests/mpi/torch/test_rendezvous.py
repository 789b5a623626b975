"""How ranks find each other: by MPI, whatever a template has exported and whether or not rank 0's name is known."""

from __future__ import annotations

import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from collectives.simulator.topology import parse
from launch.lab import client
from launch.lab.kernel import find_missing
from launch.lab.layout import lay_out
from tests import child
from tests.mpi.sizes import only_on
from tests.mpi.torch.support import WORLD

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 60
PROGRAM = """
import socket, sys
import torch, torch.distributed as dist
import mpips.torch
if "unknown" in sys.argv:
    socket.gethostname = lambda: "nowhere.invalid"
dist.init_process_group("mpips")
x = torch.ones(1)
dist.all_reduce(x)
print("rank", dist.get_rank(), "of", dist.get_world_size(), x.item())
dist.destroy_process_group()
"""
TORCHRUN_S = {
    "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
EXPORTED = [{"RANK": "0", "WORLD_SIZE": "1"}, {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, TORCHRUN_S]


@only_on(1)
@pytest.mark.parametrize(
    "exported", [pytest.param(each, marks=() if each is TORCHRUN_S else pytest.mark.full) for each in EXPORTED]
)
def test_variables_of_a_template_do_not_count(exported: dict[str, str], tmp_path: Path) -> None:
    program, said = tmp_path / "program.py", BytesIO()
    program.write_text(PROGRAM)
    start = [sys.executable, "-m", "launch.cli", "run", "-w", "2", str(program)]
    code = child.run(["env", *(f"{name}={value}" for name, value in exported.items()), *start], LIMIT, ROOT, said)
    text = said.getvalue().decode(errors="replace")
    assert code == 0 and "rank 0 of 2 2.0" in text and "rank 1 of 2 2.0" in text, text[-3000:]


@only_on(1)
@pytest.mark.full
@pytest.mark.parametrize("exported", [[], ["WORLD_SIZE=2", "RANK=0"]])
def test_a_program_that_takes_itself_for_the_only_one(exported: list[str], tmp_path: Path) -> None:
    """Many programs do so where they find no WORLD_SIZE."""
    program, said = tmp_path / "program.py", BytesIO()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    program.write_text(f"import os\nif 'WORLD_SIZE' not in os.environ: os.environ.update({alone})\n{PROGRAM}")
    child.run(["env", *exported, sys.executable, "-m", "launch.cli", "run", "-w", "2", str(program)], LIMIT, ROOT, said)
    text = said.getvalue().decode(errors="replace")
    right = ["rank 0 of 2 2.0", "rank 1 of 2 2.0"]
    wrong = ["has set RANK=0, WORLD_SIZE=1 on rank", "of MPI's 2", "export both before the start"]
    assert all(words in text for words in (right if exported else wrong)), text[-3000:]


def test_an_address_alone_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    if WORLD.size == 1:
        pytest.skip("one rank may have been started without an mpirun")
    dist.init_process_group("mpips")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    everybody = WORLD.allgather(x.item() == WORLD.size)
    assert all(everybody)


@only_on(1)
def test_a_place_that_the_program_gives_itself_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a group of gloo that is not all ranks of MPI."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "three", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="three"):  # which is what torch says
        dist.init_process_group("gloo")


@only_on(1)
@pytest.mark.full
@pytest.mark.skipif(bool(find_missing()), reason="; ".join(find_missing()))
def test_a_host_name_that_others_do_not_know() -> None:
    with client.lab(f"test-{os.getpid()}", lay_out(parse("star:2", 12.5e6))) as name:
        argv = client.job_command(name, 2, [sys.executable, "-m", "mpi4py", "-c", PROGRAM, "unknown"])
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=2 * LIMIT)
    assert "rank 0 of 2 2.0" in done.stdout and "rank 1 of 2 2.0" in done.stdout, done.stderr[-3000:]
