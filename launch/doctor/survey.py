"""Look at the machine for `mpips doctor`: packages, cores, interfaces, GPUs, and an MPI that is tried on real ranks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from mpips.collectives.kernels import engine
from mpips.collectives.machine import usable_cores
from mpips.launch.doctor import probe
from mpips.launch.machine import find_hindrances, find_leftovers, list_interfaces, list_leftover_kinds, this_machine
from mpips.launch.mpirun import (
    PMI,
    Job,
    Launcher,
    LauncherError,
    ask,
    build,
    find,
    find_obstacle_to_survival,
    lacks_scheduler,
    program,
)
from mpips.store import world

# seconds for a probe
LIMIT = 60.0
LIMIT_OF_SRUN = 30.0
# After this many seconds, print what the user is waiting for.
SILENT = 3.0
# how many ranks the probes have
RANKS = 2
RANKS_OF_A_DEATH = 3
# the name of the launcher if one has started this process as a rank
OURS = "the one that started this"
# variables that tell how many processes a launcher has started
PROMISES = (world.OPEN_MPI, world.HYDRA, world.SLURM, world.JSRUN)
# name -> (its submit command, the variable that it sets in a job)
SCHEDULERS = {"Slurm": ("sbatch", "SLURM_JOB_ID"), "LSF": ("bsub", "LSB_JOBID"), "PBS": ("qsub", "PBS_JOBID")}
PACKAGES = ("numpy", "mpi4py", "msgspec", "click", "rich", "threadpoolctl")
# optional package -> the extra of mpips that installs it
EXTRAS = {"matplotlib": "plot", "scikit-learn": "demo", "pyroute2": "lab"}
# Python programs for `_child`
KERNELS = "import json; from collectives.kernels import engine; print(json.dumps(engine.status()._asdict()))"
DEVICES = (
    "import cupy, json; r = cupy.cuda.runtime; print(json.dumps("
    "[r.getDeviceProperties(i)['name'].decode() for i in range(r.getDeviceCount())]))"
)


def look() -> dict[str, Any]:
    """Collect all that `judge` needs, as JSON-serialisable values.

    Collective if a launcher has started several ranks. Otherwise it starts ranks by mpirun, and blocks until they have
    ended, for at most `LIMIT` seconds for each probe.
    """
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "processor": platform.machine(),
        "packages": {name: _version(name) for name in (*PACKAGES, *EXTRAS)},
        "cores": usable_cores(),
        "affinity": len(os.sched_getaffinity(0)),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name in (*PROMISES, *world.MPIRUN_SIGNS) or name.startswith(("SLURM_STEP", "PMIX_NAMESPACE", "PMI_"))
        },
        "schedulers": [name for name, (tool, _) in SCHEDULERS.items() if shutil.which(tool)],
        "lacks_scheduler": lacks_scheduler(os.environ),
        "allocation": next((name for name, (_, variable) in SCHEDULERS.items() if variable in os.environ), None),
        "interfaces": [
            {"name": name, "mbit": int(speed) if speed.isdigit() else None}
            for name in list_interfaces()
            if _text(Path("/sys/class/net", name, "operstate")) != "down"
            for speed in [_text(Path("/sys/class/net", name, "speed"))]
        ],
        "kernels": look_for_kernels(),
        "gpu": _gpu(),
        "leftovers": find_leftovers(list_leftover_kinds()),
    }
    if world.started_as(os.environ):
        return {**found, "launcher": OURS, "ranks": _under_launcher()}
    try:
        launcher = find()
    except LauncherError as error:
        return {**found, "launcher": None, "ranks": {"problem": str(error)}}
    found["launcher"] = str(launcher)
    found["hindrances"] = [one._asdict() for one in find_hindrances(launcher, RANKS)]
    if any(one["sure"] for one in found["hindrances"]):
        return {**found, "ranks": {"not_tried": "no rank was started, as it would fail"}}
    progress = Progress()
    found["ranks"] = _started(progress, launcher, RANKS)
    why = find_obstacle_to_survival(launcher)
    found["death"] = {"hindrance": why} if why else _started(progress, launcher, RANKS_OF_A_DEATH, "death")
    if found["gpu"].get("devices"):
        found["cuda"] = _started(progress, launcher, RANKS, "cuda")
    if found["allocation"] == "Slurm" and shutil.which("srun"):
        found["srun"] = _by_srun(progress, PMI[launcher.flavour])
    return found


class Progress:
    """Prints on standard error what is being tried. Begins after `SILENT` seconds, so a fast run prints nothing."""

    def __init__(self) -> None:
        self._from = time.monotonic() + SILENT

    @contextmanager
    def at(self, what: str, limit: float) -> Iterator[None]:
        """Context manager for a block that tries `what`, for at most `limit` seconds."""
        words = f"mpips doctor: {what}, for at most {limit:g} s"
        timer = threading.Timer(max(0.0, self._from - time.monotonic()), click.echo, (words,), {"err": True})
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _under_launcher() -> dict[str, Any]:
    """Run the probe on the ranks that a launcher has started.

    If they cannot form a world, return the reason instead. It is found before MPI_Init, which might abort.
    """
    import mpi4py

    # Without InfiniBand, Open MPI's osc/ucx prints an error when a window is made, although another component works.
    if not this_machine().infiniband:
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    cause = world.lost(os.environ, MPI.Get_library_version())
    if cause:
        return {"lost": cause}
    with Limit(LIMIT, "mpips doctor: MPI has not started within {:g} s: have all ranks of this job called it?"):
        MPI.Init_thread()
    return probe.facts()


class Limit:
    """Context manager that limits the time of a block. After that a child prints `sentence` and kills this process.

    A child does it because this process may be inside an MPI call, where it handles no signals and runs no threads.
    """

    def __init__(self, seconds: float, sentence: str) -> None:
        self._seconds = seconds
        self._sentence = sentence.format(seconds) + "\n"

    def __enter__(self) -> None:
        caller = os.getpid()
        self._child = os.fork()
        if not self._child:
            until = time.monotonic() + self._seconds
            while os.getppid() == caller and time.monotonic() < until:
                time.sleep(0.1)
            if os.getppid() == caller:
                os.write(2, self._sentence.encode())
                os.kill(caller, signal.SIGKILL)
            os._exit(0)

    def __exit__(self, *raised: object) -> None:
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    """Return the text of a file in /sys, or "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        # The speed of an interface cannot be read while its link is down.
        return ""


def _gpu() -> dict[str, Any]:
    """Return the GPUs that CuPy finds. A child process asks CuPy, because a broken driver may crash the process."""
    present = bool(shutil.which("nvidia-smi")) or Path("/dev/nvidia0").exists()
    version = next((v for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if (v := _version(name))), None)
    if version is None:
        return {"present": present, "cupy": None}
    done = _child([sys.executable, "-P", "-c", DEVICES], LIMIT)
    return {"present": present, "cupy": version, "devices": done if isinstance(done, list) else [], "problem": done}


def look_for_kernels() -> dict[str, Any]:
    """Say whether Numba or NumPy will compute the servers' updates, or what is wrong.

    A child process imports Numba, because it is large and may be broken.
    """
    try:
        engine.chosen_engine()
    except ValueError as error:
        return {"refused": str(error)}
    done = _child([sys.executable, "-P", "-c", KERNELS], LIMIT)
    here = {"machine": platform.machine(), "libc": platform.libc_ver()[0]}
    return {**done, **here} if isinstance(done, dict) else {"problem": done}


def _started(progress: Progress, launcher: Launcher, ranks: int, *words: str) -> dict[str, Any]:
    """Run the probe on `ranks` ranks, and return what it prints, or {"problem": why}. `words`: "death" or "cuda"."""
    job = Job(ranks, program(["-m", "mpips.launch.doctor.probe", *words]), survives=words == ("death",))
    what = {"death": ", one of which is killed", "cuda": " with device buffers"}.get(" ".join(words), "")
    with progress.at(f"tries {ranks} ranks of {launcher}{what}", LIMIT):
        done = _child(build(launcher, job, this_machine()), LIMIT)
    return done if isinstance(done, dict) else {"problem": done}


def _by_srun(progress: Progress, pmi: str) -> dict[str, Any]:
    """Run the probe on two ranks that srun starts in this allocation, and return what it prints, or the problem.

    --time=1 makes Slurm end them after a minute, if they are still running after this process has given up.
    """
    options = [f"--mpi={pmi}", f"--ntasks={RANKS}", "--nodes=1", "--overlap", "--overcommit", "--time=1"]
    with progress.at(f"tries {RANKS} ranks by srun --mpi={pmi}", LIMIT_OF_SRUN):
        done = _child(["srun", *options, *program(["-m", "mpips.launch.doctor.probe"], sys.executable)], LIMIT_OF_SRUN)
    return {"pmi": pmi, "ranks": done if isinstance(done, dict) else {"problem": done}}


def _child(argv: list[str], limit: float) -> Any:
    """Run a command, and return the JSON that it prints on a line. If there is none, return the reason as a string."""
    try:
        done = ask(argv, limit)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit:g} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    words = [line for line in (done.stderr + done.stdout).splitlines() if line.strip(" -")]
    return f"exit code {done.returncode}: {words[-1].strip() if words else 'it printed nothing'}"
