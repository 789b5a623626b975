"""The backend by its name alone: programs that import torch and nothing of ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.child import ROOT, outside
from tests.mpi.sizes import only_on

SUM = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group({name!r})
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x, y = torch.ones(3), torch.ones(2)
dist.all_reduce(x)
dist.all_reduce(y, group=mesh.get_group())
assert dist.get_backend() == {name!r}, dist.get_backend()
print("sums", int(x.sum() + y.sum()))
dist.destroy_process_group()
"""
JOIN = 'import torch.distributed as dist; dist.init_process_group("mpips")'

pytestmark = only_on(1)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of programs that find mpips as an installed package, and no launcher's variables."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder)],
        cwd=ROOT,
        check=True,
        timeout=60,
        capture_output=True,
    )
    return {**outside(), "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python, 60 seconds at most."""
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("name", ["mpips", "cpu:mpips", "cpu:mpips,cuda:nccl", "cpu:mpips,cuda:gloo"])
def test_a_program_names_the_backend_only(name: str, installed: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(SUM.format(name=name))
    done = run(["-m", "launch.cli", "run", "-w", "2", str(program)], installed)
    assert done.returncode == 0 and done.stdout.count("sums 10") == 2, done.stderr[-2000:]


@pytest.mark.core(1)
@pytest.mark.parametrize("name", ["mpip", "MPIPS ", "cpu:mpis,cuda:nccl"])
def test_a_misspelt_name_is_answered_with_ours(name: str, installed: dict[str, str]) -> None:
    line = f"import torch.distributed as dist; dist.init_process_group({name!r})"
    done = run(["-m", "launch.cli", "run", "-w", "2", "--", "-c", line], installed)
    assert done.returncode and 'did you mean init_process_group("mpips")?' in done.stderr, done.stderr[-2000:]


def test_importing_torch_loads_nothing_of_ours(installed: dict[str, str]) -> None:
    """The name is known; MPI and the packages are not loaded."""
    code = (
        "import torch, sys; print(sorted({'mpi4py', 'mpips', 'collectives', 'launch.mpirun'} & set(sys.modules))); "
        "assert torch.distributed.is_backend_available('mpips')"
    )
    done = run(["-c", code], installed)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stderr[-2000:]


def test_a_backend_that_cannot_load_says_so_when_named(installed: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so cannot be opened')")
    broken = {**installed, "PYTHONPATH": os.pathsep.join([str(tmp_path), installed["PYTHONPATH"]])}
    assert run(["-c", "import torch"], broken).returncode == 0
    done = run(["-c", JOIN], broken)
    assert 'init_process_group("mpips"): the backend cannot be loaded (libmpi.so' in done.stderr


def test_torchrun_is_refused_by_a_sentence(installed: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(JOIN)
    done = run(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)], installed)
    assert done.returncode != 0 and "start with `mpips run -w 2`" in done.stderr
