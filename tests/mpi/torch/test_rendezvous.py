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
from mpips.store import world
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
ASKS = """
import os, sys
import torch, torch.distributed as dist
if sys.argv[1] == "mpips":
    import mpips.torch
ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group(sys.argv[1])
torch.manual_seed(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Linear(4, 1)
if ddp and "wrap" in sys.argv:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
dist.all_reduce(loss.detach())  # for a log
os.write(1, f"weight of {os.environ['RANK']}: {next(model.parameters())[0, 0].item()}\\n".encode())
dist.destroy_process_group()
"""
TORCHRUN_S = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "0",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
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
@pytest.mark.parametrize("asks", [True, False])
def test_a_program_that_takes_itself_for_the_only_one(asks: bool, tmp_path: Path) -> None:
    """Many programs do so where they find no WORLD_SIZE."""
    program, said = tmp_path / "program.py", BytesIO()
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29517"}
    asked = "if 'WORLD_SIZE' not in os.environ: " if asks else ""
    program.write_text(f"import os\n{asked}os.environ.update({alone})\n{PROGRAM}")
    child.run([sys.executable, "-m", "launch.cli", "run", "-w", "2", str(program)], LIMIT, ROOT, said)
    text = said.getvalue().decode(errors="replace")
    right = ["rank 0 of 2 2.0", "rank 1 of 2 2.0"]
    wrong = ["has set RANK=0, WORLD_SIZE=1 on rank", "of MPI's 2", "export both before the start"]
    assert all(words in text for words in (right if asks else wrong)), text[-3000:]


@only_on(1)
@pytest.mark.parametrize("backend, wraps", [("gloo", True), ("mpips", True), ("mpips", False)])
def test_a_program_that_asks_for_rank_trains_with_the_others_or_is_told(
    backend: str, wraps: bool, tmp_path: Path
) -> None:
    """As a wrapper of another library may leave the model as it is, where it does not know the backend's name."""
    program, said = tmp_path / "program.py", BytesIO()
    program.write_text(ASKS)
    words = [str(program), backend, *(["wrap"] if wraps else [])]
    code = child.run([sys.executable, "-m", "launch.cli", "run", "-w", "2", *words], 2 * LIMIT, ROOT, said)
    text = said.getvalue().decode(errors="replace")
    weights = {line.split()[-1] for line in text.splitlines() if line.startswith("weight of")}
    note = "made a process group, but no gradients went through it: each rank has trained a model of its own"
    assert (code, len(weights), note in text) == (0, 1 if wraps else 2, not wraps), text[-3000:]


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
def test_a_place_that_another_launcher_gives_a_child_of_a_rank_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address, and the first child's rank, are those that the parent had of `mpips run`."""
    monkeypatch.setattr("mpips.torch.backend.launched_as", lambda environment: None)
    monkeypatch.setenv(world.PLACE, "MASTER_ADDR=127.0.0.1,MASTER_PORT=20000,RANK=0,WORLD_SIZE=2")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "three", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="three"):
        dist.init_process_group("gloo")


@only_on(1)
@pytest.mark.full
@pytest.mark.skipif(bool(find_missing()), reason="; ".join(find_missing()))
def test_a_host_name_that_others_do_not_know() -> None:
    with client.lab(f"test-{os.getpid()}", lay_out(parse("star:2", 12.5e6))) as name:
        argv = client.job_command(name, 2, [sys.executable, "-m", "mpi4py", "-c", PROGRAM, "unknown"])
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=2 * LIMIT)
    assert "rank 0 of 2 2.0" in done.stdout and "rank 1 of 2 2.0" in done.stdout, done.stderr[-3000:]
