"""`make gpu`: every check that needs a card, and what needs many cores, in 8 minutes and without a network.

    python3 -m tests.gpu [--out out] [--wheels .whl] [--seconds 460] [--only TEXT]

Where there is no card it says so and leaves with 0. It runs in the Python that starts it if all that it needs is
installed there. Otherwise it makes `.venv-gpu`, which sees that Python's packages, and installs the wheels of the
folder `--wheels` into it. Where there are no wheels it asks pip for the extras `test` and `gpu`. Only the standard
library is needed until then; `tests.gpu.stages` does the rest.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from launch import LauncherError, find, venv

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv-gpu"
NEEDED = (
    "numpy",
    "mpi4py",
    "msgspec",
    "ml_dtypes",
    "click",
    "rich",
    "threadpoolctl",
    "cupy",
    "pytest",
    "pytest_mpi",
    "pytest_timeout",
    "hypothesis",
)
DRIVER = """
import ctypes
try:
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    error = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    print(f"its driver gives error {error}" if error else "" if count.value else "its driver finds none")
except OSError:
    print("NVIDIA's driver (libcuda.so.1) is not installed")
"""
MISSING = "import sys, importlib.util as u; print(*(name for name in sys.argv[1:] if u.find_spec(name) is None))"
PACKAGES = "import sysconfig; print(sysconfig.get_path('platlib'))"
LIMIT = 120  # seconds for a question, or for pip with wheels


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Check mpips on a card.")
    parser.add_argument("--out", default="out", help="folder for gpu.json and gpu.md")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", help="a folder of wheels to install from")
    parser.add_argument("--seconds", default="460", help="that all checks together may take")
    parser.add_argument("--only", default="", help="run only stages with this in their names")
    asked = parser.parse_args()
    if why := no_card():
        print(f"mpips: no GPU was checked, as there is no card here: {why}")
        return
    python = environment(sys.executable, asked.wheels, ENVIRONMENT)
    words = ["--out", asked.out, "--seconds", asked.seconds, "--only", asked.only]
    sys.stdout.flush()
    os.execv(python, [python, "-m", "tests.gpu.stages", *words])


def no_card() -> str:
    """Return why there is no card to compute on; "" where there is one. A driver that crashes takes a child with it."""
    said = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, timeout=LIMIT, check=False)
    return said.stdout.strip() if not said.returncode else f"its driver ended Python with exit code {said.returncode}"


def environment(python: str, wheels: Path, folder: Path) -> str:
    """Return a Python that has all that the checks need: `python`, or that of an environment that is made in `folder`.

    Leaves with a sentence where something cannot be had.
    """
    if not lacking(python):
        return python
    carried = sorted(map(str, wheels.glob("*.whl")))
    if not carried:
        print(f"mpips: {python} lacks {lacking(python)}, and {wheels} holds no wheels: asking pip", flush=True)
        words = ["--mpi", "auto", "--extra", "test", "--extra", "gpu"]
        made = ROOT / ".venv"
        if subprocess.run([python, "-m", "launch.venv", str(made), *words], cwd=ROOT, check=False).returncode:
            sys.exit("mpips: without a network, carry wheels: docs/how-to/benchmarks.md says which")
        return str(made / "bin" / "python")
    inside = str(folder / "bin" / "python")
    os.environ["PATH"] = os.pathsep.join([str(Path(python).parent), os.environ.get("PATH", "")])  # an mpirun there
    ask([python, "-m", "venv", "--clear", "--without-pip", str(folder)])
    site, outer = (Path(ask([each, "-c", PACKAGES]).strip()) for each in (inside, python))
    (site / "outer.pth").write_text(f"{outer}\n")
    words = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check"]
    ask([python, "-m", "pip", "--python", inside, *words, *carried])
    if (outer / "nvidia").is_dir() and not (site / "nvidia").exists():
        (site / "nvidia").symlink_to(outer / "nvidia")  # CuPy looks for CUDA's libraries in no other folder
    if missing := lacking(inside):
        sys.exit(f"mpips: {python} with the wheels of {wheels} lacks {missing}: carry their wheels, too")
    return inside


def lacking(python: str) -> str:
    """Return the packages that a Python lacks, or what keeps its ranks from forming a world; "" where it has all."""
    missing = ask([python, "-c", MISSING, *NEEDED]).split()
    if missing:
        return ", ".join(missing)
    try:
        launcher = find(python=python)
    except LauncherError as error:
        return f"an MPI ({error})"
    return "" if venv.fits(launcher, Path(python)) else f"an MPI that its mpi4py fits, which {launcher} is not"


def ask(argv: list[str]) -> str:
    """Return what a command prints; leaves with its last words where it fails."""
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        sys.exit(f"mpips: `{' '.join(argv[:4])} ...` failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.stdout


if __name__ == "__main__":
    main()
