"""`mpips run`: one MPI job of workers and servers; and `start`, which other commands use for their `--ranks`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import click

from launch import network, restarts, script, surroundings, survival
from launch.hosts import Host, Placed, place, read
from launch.machine import check_room, crowd, loopback, settings, this_machine
from launch.mpirun import Job, Launcher, LauncherError, Machine, build, find, program
from launch.running import process
from mpips.store import world
from mpips.store.options import PREFIX, OptionError, Options, uneven
from mpips.store.options import read as read_options

Words = tuple[str, ...]
ROLES = ("servers", "clients", "workers", "masters")


def role_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every command which writes down a job takes; `workers_of` reads two of them."""
    for option in (
        click.option(
            "--masters", type=click.Choice(["one", "all"]), default="one", show_default=True,
            help="Who of a client talks to the servers: its rank 0, or every worker with its own shard.",
        ),
        click.option(
            "-c", "--clients", type=click.IntRange(1), default=1, show_default=True,
            help="MPI clients of an mpi_* store.",
        ),
        click.option(
            "-w", "--workers", type=click.IntRange(1),
            help="Workers in all, as many a client, or nearly.",
        ),
        click.option("-n", "--ranks", type=click.IntRange(1), help="All ranks, in place of -w: workers and servers."),
        click.option(
            "-s", "--servers", default=0, show_default=True, type=click.IntRange(0),
            help="Server processes; 0 is pure MPI.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


def workers_of(ranks: int | None, workers: int | None, servers: int) -> int:
    """The workers of a job; click.UsageError where the command line gives none, or contradicts itself."""
    if ranks is None:
        if workers is None:
            raise click.UsageError("how many ranks? Give -n/--ranks, which counts all, or -w/--workers")
        return workers
    if servers >= ranks:
        least = f"ask for --ranks {servers + 1} or more"
        raise click.UsageError(f"--ranks {ranks} and --servers {servers} leave no worker: {least}")
    if workers not in (None, ranks - servers):
        raise click.UsageError(
            f"--ranks {ranks} and --servers {servers} make {ranks - servers} workers, but --workers is {workers}: "
            "give --ranks or --workers"
        )
    return ranks - servers


class RunCommand(click.Command):
    """A command that after Ctrl-C, before its job has started, ends as the others do (`terminal.console`)."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(f"\n{ctx.command_path}: interrupted", err=True)
            sys.exit(process.INTERRUPTED)


spares_option = click.option(
    "--spares",
    type=click.IntRange(0),
    help="So many ranks more, which take the places of ranks that die; 0: the others go on. Open MPI with ULFM.",
)


def save_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a job that saves itself, for every command that writes down a job."""
    for option in (
        click.option(
            "--restarts", "tries", type=click.IntRange(0), default=0, show_default=True, metavar="N",
            help="Start a job that a death has ended again, at most so many times; needs --checkpoint and --every.",
        ),
        click.option("--every", type=click.IntRange(1), metavar="ROUNDS",
                     help="Rounds of each key between two such saves."),
        click.option("--checkpoint", metavar="DIR",
                     help="Folder in which the store saves itself, and from which the job goes on; with --every."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command("run", cls=RunCommand, context_settings=dict(script.BEFORE_A_SCRIPT))
@role_options
@spares_option
@click.option("--hostfile", type=click.Path(), help="Hosts, one a line: `node1 slots=4` or `node1:4`.")
@click.option("--topology", help="Order the hosts by their addresses in it: bcube:3,2, star:9 or fattree:4.")
@click.option("--nics", help="With --topology: the NIC of each level, level 0 first, as eth1,eth2.")
@click.option("--interface", help="Network interface, or subnet, for MPI's TCP traffic between hosts.")
@click.option("--mpirun", help="The mpirun to use instead of the one found.")
@click.option("--mpi-arg", "extra", multiple=True, help="A further word for mpirun; may be repeated.")
@click.option(
    "-x",
    "--env",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set this variable for all ranks, on every host; without a value: as it is set here. May be repeated.",
)
@save_options
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
@script.argument
def command(
    mpirun: str | None, interface: str | None, extra: Words, dry_run: bool, words: Words, ranks: int | None,
    workers: int | None, checkpoint: str | None, tries: int, variables: Words, **asked: Any,
) -> None:  # fmt: skip
    """Start SCRIPT.py ARGS as one MPI job of workers and servers.

    The job has WORKERS + SERVERS ranks, workers first: say how many by -w and -s, or all by -n and the servers by -s.
    The roles reach `mpips.create` as MPIPS_* variables. An uncaught exception of one rank ends the job; the exit code
    is the job's, or 2 where none is started.
    """
    asked["workers"] = workers_of(ranks, workers, asked["servers"])
    folder = None if checkpoint is None else restarts.place_of(checkpoint)
    saves = {"checkpoint": folder, "every": asked.pop("every")}
    try:
        options = options_of({**{name: asked.pop(name) for name in (*ROLES, "spares")}, **saves})
        if not dry_run:
            check_alone()
        asked["environment"] = variables_of(variables, os.environ)
        machine, launcher = this_machine(), find(mpirun)
        if options.spares >= 0:
            survival.check(launcher, options.spares)
        start = Start(launcher, machine, words, interface, extra, asked)
        job = start.job(options, start.named())
        argv = build(launcher, job, machine)
        restarts.check(options, tries)
        if not dry_run:
            check_room(job)
            start.doubt = surroundings.check(launcher, job.ranks_here(os.environ))
            restarts.make_folder(options)
        if interface and not dry_run:
            network.check_interface(interface, launcher, job.hosts, machine, extra)
    except (LauncherError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if options.workers % options.clients:
        click.echo(uneven(options.workers, options.clients), err=True)
    if dry_run:
        click.echo(shlex.join(argv))
        return
    script.check(words)
    _warn(job, machine)
    remote = bool(job.hosts) and job.ranks_here(os.environ) < job.ranks
    sys.exit(restarts.until_it_ends(start, start.fitting, options, tries, remote, launcher.flavour))


class Start:
    """Starts the job of a command line, with whatever roles; `asked`: `hostfile`, `topology`, `nics` and the user's
    `environment` of the ranks."""

    def __init__(
        self, launcher: Launcher, machine: Machine, words: Words, interface: str | None, extra: Words,
        asked: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._launcher, self._machine, self._words, self._extra = launcher, machine, words, extra
        self._interface, self._asked = interface, asked
        self._name = click.get_current_context().command_path
        self._answering: tuple[Host, ...] | None = None
        self.doubt = ""
        """What may be in the way of the job: said where it fails."""

    def __call__(self, options: Options) -> process.Ended:
        """Blocking, until it has ended."""
        job = self.job(options, self.named() if self._answering is None else self._answering)
        argv, here = build(self._launcher, job, self._machine), job.ranks_here(os.environ)
        ended = process.run(argv, name=self._name, roles=_roles(options), here=here, spares=options.spares)
        return ended._replace(sentence=_with_doubt(ended, self.doubt))

    def named(self) -> tuple[Host, ...]:
        """The hosts of the hostfile."""
        return read(self._asked["hostfile"]) if self._asked["hostfile"] else ()

    def job(self, options: Options, named: tuple[Host, ...]) -> Job:
        """The job on these hosts; LauncherError or ValueError where they do not hold it."""
        hosts = _hosts(options, self._launcher, self._machine, named=named, topology=self._asked["topology"],
                       nics=self._asked["nics"], interface=self._interface, extra=self._extra)  # fmt: skip
        job = _job(options, self._words, hosts, self._machine, self._interface, self._extra)
        own = loopback(job, self._launcher, os.environ)
        asked = self._asked["environment"]
        given = {name: value for name, value in asked.items() if value is not None}
        exported = tuple(name for name in asked if name not in given)
        return job._replace(environment={**own, **job.environment, **given}, exported=exported)

    def fitting(self, options: Options) -> Options:
        """The roles that fit on the hosts that answer now, to which later starts keep."""
        named = self.named()
        self._answering = restarts.answering(named, self._launcher, self._machine, self._extra)
        if self._asked["topology"] and len(self._answering) < len(named):
            raise LauncherError("a host of the --topology does not answer")
        return restarts.fit(options, self._answering)


def options_of(roles: Mapping[str, int | str | None]) -> Options:
    """The options of a job with these roles, the others by variables; click.UsageError says what is wrong with one."""
    try:
        return read_options(roles)
    except OptionError as error:
        raise click.UsageError(str(error)) from None


def variables_of(given: Sequence[str], environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that `--env NAME[=VALUE]` asks for, with those values; None: the one that it has here, which
    is not to stand among the words of a command, where other users see it.

    Raises:
        LauncherError: What is no name of a variable, is not set here, or is an option of mpips.
    """
    found: dict[str, str | None] = {}
    for word in given:
        name, assigned, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise LauncherError(f"--env {word!r} names no variable: write NAME=VALUE, or NAME alone for its value here")
        if name.startswith(PREFIX):
            raise LauncherError(
                f"--env {word}: {PREFIX}* variables reach all ranks by themselves: set it before `mpips run`"
            )
        if not assigned and name not in environment:
            raise LauncherError(f"--env {word}: no variable {name} is set here: write {name}=VALUE")
        found[name] = value if assigned else None
    return found


def start(ranks: int, words: Sequence[str], mpirun: str | None = None, name: str = "") -> NoReturn:
    """Runs, and ends with, an MPI job of `ranks` processes on this machine; its exit code becomes the job's, or what
    the ranks have left with (`collectives.terminal.console.leave`). `name`: the command that a signal interrupts."""
    from collectives.terminal.console import CODE_FILE  # `mpips --help` does without

    machine = this_machine()
    left = os.memfd_create("code")
    environment = {**settings(ranks, machine, os.environ), CODE_FILE: f"/proc/{os.getpid()}/fd/{left}"}
    if sys.stdout.isatty():  # ranks cannot see how wide it is
        environment["COLUMNS"] = str(os.get_terminal_size(sys.stdout.fileno()).columns)
    job = Job(ranks, program(words), environment)
    try:
        check_alone()
        check_room(job)
        launcher = find(mpirun)
        job = job._replace(environment={**loopback(job, launcher, os.environ), **environment})
        doubt = surroundings.check(launcher, job.ranks_here(os.environ))
        argv = build(launcher, job, machine)
    except LauncherError as error:
        raise click.UsageError(str(error)) from error
    _warn(job, machine)
    ended = process.run(argv, name=name, here=job.ranks_here(os.environ))
    process.tell(_with_doubt(ended, doubt))
    sys.exit(ended.code or int.from_bytes(os.pread(left, 1, 0), "little"))


def _hosts(
    options: Options, launcher: Launcher, machine: Machine, *, named: tuple[Host, ...], topology: str | None,
    nics: str | None, interface: str | None, extra: Words,
) -> tuple[Placed, ...]:  # fmt: skip
    """Which ranks go to which host; none where all stay here."""
    placed = place(named, options.workers, options.servers, max(options.spares, 0)) if named else ()
    if nics and not topology:
        raise LauncherError("--nics says which NIC serves which level of a --topology: give that, too")
    if not topology:
        return placed
    from launch.topology import TopologyRequest, place_in  # NumPy only where it is needed

    wanted = TopologyRequest(topology, tuple((nics or "").split(",")), interface)
    return place_in(wanted, options, named, launcher, machine, extra)


def _job(
    options: Options, words: Words, hosts: tuple[Placed, ...], machine: Machine, interface: str | None,
    extra: Words,
) -> Job:  # fmt: skip
    ranks = options.workers + options.servers + max(options.spares, 0)
    job = Job(ranks, program(words), {}, hosts, interface, extra, survives=options.spares >= 0)
    roles = {PREFIX + name.upper(): str(getattr(options, name)) for name in ROLES}
    environment = {**options.environment(), **roles, **settings(job.busiest, machine, os.environ)}
    if hosts and "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return job._replace(environment=environment)


def _roles(options: Options) -> list[str]:
    """What each rank is, to say of one that died."""
    of_client = options.workers / options.clients
    clients = [f" of client {int(rank / of_client)}" if options.clients > 1 else "" for rank in range(options.workers)]
    return [f"worker{client}" for client in clients] + ["server"] * options.servers + ["spare"] * options.spares


def check_alone() -> None:
    """LauncherError in a rank of a job of several: each of its ranks would start a whole job."""
    if job := world.started_as(os.environ):
        rank, size = job
        name = click.get_current_context().command_path
        raise LauncherError(
            f"{name} starts the ranks itself, and here it is itself rank {rank} of {size} that a launcher has started: "
            "call it once, without that launcher, or let that launcher start `python -m mpips SCRIPT.py`"
        )


def _with_doubt(ended: process.Ended, doubt: str) -> str:
    """Return what is to be said of the end of a job, and of what may have been in its way."""
    if not doubt or not ended.code or ended.heard:
        return ended.sentence
    return f"{ended.sentence}; {doubt}" if ended.sentence else f"mpips: {doubt}"


def _warn(job: Job, machine: Machine) -> None:
    one_node = os.environ.get("SLURM_NNODES", os.environ.get("SLURM_JOB_NUM_NODES")) == "1"
    if machine.lacks_scheduler and not job.hosts and not one_node:
        click.echo(f"mpips: {machine.lacks_scheduler}: all ranks start on this machine", err=True)
    if warning := crowd(job, machine, os.environ):
        click.echo(warning, err=True)


if __name__ == "__main__":
    command()
