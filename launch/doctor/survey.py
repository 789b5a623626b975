"""Collect what `mpips doctor` checks: packages, cores, network interfaces, GPUs, and MPI.

MPI is tried on real ranks, by the program `launch.doctor.probe`.
"""

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
    build,
    build_rank_command,
    describe_missing_scheduler,
    find,
    find_obstacle_to_survival,
    run_tool,
)
from mpips.store import world

# seconds that a probe may take
LIMIT = 60.0
LIMIT_OF_SRUN = 30.0
# after this many seconds the command prints on standard error what it is waiting for
SILENT = 3.0
# the number of ranks in an ordinary probe, and in the probe in which a rank is killed
RANKS = 2
RANKS_OF_A_DEATH = 3
# the text shown in place of the launcher's name, if a launcher has started this process as a rank
OURS = "the one that started this"
# variables in which launchers put the number of processes
SIZE_VARIABLES = (world.OPEN_MPI, world.HYDRA, world.SLURM, world.JSRUN)
# name of a scheduler -> (its submit command, an environment variable that it sets in a job)
SCHEDULERS = {"Slurm": ("sbatch", "SLURM_JOB_ID"), "LSF": ("bsub", "LSB_JOBID"), "PBS": ("qsub", "PBS_JOBID")}
PACKAGES = ("numpy", "mpi4py", "msgspec", "click", "rich", "threadpoolctl")
# optional package -> the extra of mpips that installs it
EXTRAS = {"matplotlib": "plot", "scikit-learn": "demo", "pyroute2": "lab"}
# Python programs for `_run_child`
KERNELS = "import json; from collectives.kernels import engine; print(json.dumps(engine.status()._asdict()))"
DEVICES = (
    "import cupy, json; r = cupy.cuda.runtime; print(json.dumps("
    "[r.getDeviceProperties(i)['name'].decode() for i in range(r.getDeviceCount())]))"
)


def look() -> dict[str, Any]:
    """Collect the data from which `doctor.__main__.judge` makes checks. The data can be written as JSON.

    Collective if a launcher has started this process as a rank. Otherwise this starts ranks by mpirun, and blocks until
    the ranks have ended. Each probe may take `LIMIT` seconds.
    """
    survey: dict[str, Any] = {
        "python": sys.version.split()[0],
        "processor": platform.machine(),
        "packages": {name: _version(name) for name in (*PACKAGES, *EXTRAS)},
        "cores": usable_cores(),
        "affinity": len(os.sched_getaffinity(0)),
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name in (*SIZE_VARIABLES, *world.MPIRUN_SIGNS)
            or name.startswith(("SLURM_STEP", "PMIX_NAMESPACE", "PMI_"))
        },
        "schedulers": [name for name, (tool, _) in SCHEDULERS.items() if shutil.which(tool)],
        "missing_scheduler": describe_missing_scheduler(os.environ),
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
        return {**survey, "launcher": OURS, "ranks": _under_launcher()}
    try:
        launcher = find()
    except LauncherError as error:
        return {**survey, "launcher": None, "ranks": {"problem": str(error)}}
    survey["launcher"] = str(launcher)
    survey["hindrances"] = [hindrance._asdict() for hindrance in find_hindrances(launcher, RANKS)]
    if any(hindrance["certain"] for hindrance in survey["hindrances"]):
        return {**survey, "ranks": {"not_tried": "no rank was started, as it would fail"}}
    progress = ProbeProgress()
    survey["ranks"] = _run_probe(progress, launcher, RANKS)
    why = find_obstacle_to_survival(launcher)
    survey["death"] = {"hindrance": why} if why else _run_probe(progress, launcher, RANKS_OF_A_DEATH, "death")
    if survey["gpu"].get("devices"):
        survey["cuda"] = _run_probe(progress, launcher, RANKS, "cuda")
    if survey["allocation"] == "Slurm" and shutil.which("srun"):
        survey["srun"] = _probe_by_srun(progress, PMI[launcher.flavour])
    return survey


class ProbeProgress:
    """Prints on standard error which probe is running.

    Nothing is printed in the first `SILENT` seconds of the command, so a fast command prints nothing.
    """

    def __init__(self) -> None:
        self._first_time = time.monotonic() + SILENT

    @contextmanager
    def at(self, what: str, limit: float) -> Iterator[None]:
        """Context manager around a probe. `what` describes the probe, and `limit` is the seconds that it may take."""
        line = f"mpips doctor: {what}, for at most {limit:g} s"
        timer = threading.Timer(max(0.0, self._first_time - time.monotonic()), click.echo, (line,), {"err": True})
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _under_launcher() -> dict[str, Any]:
    """Run the probe on the ranks that a launcher has started.

    If these ranks cannot form one MPI world, return the reason as "lost". This is checked before MPI_Init, which might
    abort in that case.
    """
    import mpi4py

    # Without InfiniBand, Open MPI's osc/ucx prints an error when a window is made, although another component works.
    if not this_machine().infiniband:
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    reason = world.lost(os.environ, MPI.Get_library_version())
    if reason:
        return {"lost": reason}
    with TimeLimit(LIMIT, "mpips doctor: MPI has not started within {:g} s: have all ranks of this job called it?"):
        MPI.Init_thread()
    return probe.examine()


class TimeLimit:
    """Context manager that limits the time of a block. After that time a child process kills this process.

    A signal handler or a thread of this process could not do that. This process may be inside an MPI call, and then
    none of its Python code runs.

    Args:
        seconds: The limit.
        sentence: The message that the child prints before it kills this process. "{}" in it stands for the limit.
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
    """Return the GPUs that CuPy finds.

    A child process imports CuPy and looks for them, because a broken driver may crash the process.
    """
    present = bool(shutil.which("nvidia-smi")) or Path("/dev/nvidia0").exists()
    version = next((v for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if (v := _version(name))), None)
    if version is None:
        return {"present": present, "cupy": None}
    output = _run_child([sys.executable, "-P", "-c", DEVICES], LIMIT)
    devices = output if isinstance(output, list) else []
    return {"present": present, "cupy": version, "devices": devices, "problem": output}


def look_for_kernels() -> dict[str, Any]:
    """Return whether Numba or NumPy will compute the servers' updates, or a problem that was found.

    A child process imports Numba, because Numba is large and its installation may be broken.
    """
    try:
        engine.chosen_engine()
    except ValueError as error:
        return {"refused": str(error)}
    output = _run_child([sys.executable, "-P", "-c", KERNELS], LIMIT)
    system = {"machine": platform.machine(), "libc": platform.libc_ver()[0]}
    return {**output, **system} if isinstance(output, dict) else {"problem": output}


def _run_probe(progress: ProbeProgress, launcher: Launcher, ranks: int, kind: str = "") -> dict[str, Any]:
    """Run the probe on `ranks` ranks, and return its result. If the probe fails, return {"problem": why}.

    `kind` is the argument of the probe: "death", "cuda", or "" for the basic test.
    """
    arguments = [kind] if kind else []
    job = Job(ranks, build_rank_command(["-m", "mpips.launch.doctor.probe", *arguments]), survives=kind == "death")
    what = {"death": ", one of which is killed", "cuda": " with device buffers"}.get(kind, "")
    with progress.at(f"tries {ranks} ranks of {launcher}{what}", LIMIT):
        output = _run_child(build(launcher, job, this_machine()), LIMIT)
    return output if isinstance(output, dict) else {"problem": output}


def _probe_by_srun(progress: ProbeProgress, pmi: str) -> dict[str, Any]:
    """Run the probe on two ranks that srun starts in this allocation. Return its result, or the problem.

    This process gives up after `LIMIT_OF_SRUN` seconds. With --time=1 Slurm then ends the ranks after a minute.
    """
    options = [f"--mpi={pmi}", f"--ntasks={RANKS}", "--nodes=1", "--overlap", "--overcommit", "--time=1"]
    with progress.at(f"tries {RANKS} ranks by srun --mpi={pmi}", LIMIT_OF_SRUN):
        command = build_rank_command(["-m", "mpips.launch.doctor.probe"])
        output = _run_child(["srun", *options, *command], LIMIT_OF_SRUN)
    return {"pmi": pmi, "ranks": output if isinstance(output, dict) else {"problem": output}}


def _run_child(argv: list[str], limit: float) -> Any:
    """Run a command, and return the value of the last line of JSON that it prints.

    If the command fails or prints no JSON, return the reason as a string.
    """
    try:
        done = run_tool(argv, limit)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit:g} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    messages = [line for line in (done.stderr + done.stdout).splitlines() if line.strip(" -")]
    return f"exit code {done.returncode}: {messages[-1].strip() if messages else 'it printed nothing'}"
