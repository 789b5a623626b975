"""`mpips run`: one MPI job of workers and servers; and `start`, which other commands use for their `--ranks`.

An error that every rank would report, such as a script with a syntax error, is reported once, before any rank starts.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import random
import re
import shlex
import socket
import sys
import traceback
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any, NoReturn
from urllib.parse import quote

import click

from mpips.collectives import log
from mpips.collectives.machine import open_memory
from mpips.collectives.recorder import folders, tracing
from mpips.collectives.recorder import own as recorder
from mpips.collectives.terminal import Interruptible, Whole
from mpips.launch import restarts
from mpips.launch.hosts import Host, place, read
from mpips.launch.machine import (
    check_room,
    check_surroundings,
    choose_loopback,
    choose_settings,
    this_machine,
    warn_of_crowd,
)
from mpips.launch.mpirun import Job, Launcher, LauncherError, Machine, build, check_spares, find, find_agent, program
from mpips.launch.observe.options import OBSERVED, check_recorder, observe_options, observing
from mpips.launch.running import process
from mpips.store import world
from mpips.store.checkpoint import folder as checkpoints
from mpips.store.options import OF_PROCESSES, PREFIX, OptionError, Options, uneven
from mpips.store.options import read as read_options

Words = tuple[str, ...]
PYTHON = re.compile(r"python[\d.]*")
ELF = b"\x7fELF"
# The first line of a shell script. Where the path of Python is too long for a first line, pip writes a shell's first
# line, and a second line that runs Python: that is a Python script.
SHELL = re.compile(rb"#!.*\b(ba|da|k|z)?sh\b(?!.*\n.*python)")
# A script that reads its command line contains one of these words, whichever library it uses.
READS_WORDS = re.compile(rb"arg|pars|option|flag|click|typer|fire|hydra|tyro|absl|cli", re.IGNORECASE)
# The ports to choose from. From 32768 on the kernel gives ports to outgoing connections.
PORTS = range(20000, 32768)
# Variables of torchrun that differ from rank to rank. If the user has set one, all ranks get the same value of it.
TOLD_BY_RANK = (world.RANK, world.SIZE, world.LOCAL_RANK)
ROLES = ("servers", "clients", "workers", "masters")


def _parse_script(ctx: click.Context, parameter: click.Parameter, words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of the program: `SCRIPT.py ARGS`, `-m MODULE ARGS` or `-c LINE`, without a `--` before them.

    Raises UsageError for anything else.
    """
    words = tuple(words[1:] if words[:1] == ("--",) else words)
    if not words:
        raise click.UsageError(
            "no script is named: SCRIPT.py, -m MODULE, or, as -c alone means --clients, a line of Python by -- -c LINE"
        )
    if words[0] in ("-m", "-c"):
        if len(words) < 2:
            raise click.UsageError(f"{words[0]} needs an argument")
    elif (option := words[0].partition("=")[0]).startswith("-"):
        # An unknown option before the script. click has left it to us (ignore_unknown_options).
        known = [name for one in ctx.command.params for name in one.opts if name.startswith("--")]
        raise click.NoSuchOption(option, possibilities=difflib.get_close_matches(option, known, cutoff=0.7))
    elif PYTHON.fullmatch(os.path.basename(words[0])):
        raise click.UsageError(f"leave out {words[0]!r}: the ranks run the script that follows it by {sys.executable}")
    return words


# The click settings of a command that takes `script_argument`: options after the script belong to the script.
BEFORE_A_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
script_argument = click.argument(
    "words",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SCRIPT.py|-m MODULE [ARGS]...",
    is_eager=True,
    callback=_parse_script,
)


def role_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for the roles of a job's ranks. Pass --ranks, --workers and --servers to `workers_of`."""
    for option in (
        click.option(
            "--masters",
            type=click.Choice(["one", "all"]),
            default="one",
            show_default=True,
            help="Who of a client talks to the servers: its rank 0, or every worker with its own shard.",
        ),
        click.option(
            "-c",
            "--clients",
            type=Whole(1),
            default=1,
            show_default=True,
            help="MPI clients of an mpi_* store.",
        ),
        click.option(
            "-w",
            "--workers",
            type=Whole(1),
            help="Workers in all, as many a client, or nearly.",
        ),
        click.option("-n", "--ranks", type=Whole(1), help="All ranks, in place of -w: workers and servers."),
        click.option(
            "-s",
            "--servers",
            default=0,
            show_default=True,
            type=Whole(0),
            help="Server processes; 0 is pure MPI.",
        ),
    ):
        command = option(command)
    return command


def workers_of(ranks: int | None, workers: int | None, servers: int) -> int:
    """Return the number of workers of a job, from the values of --ranks, --workers and --servers.

    Raises click.UsageError if they leave no worker or contradict each other.
    """
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


spares_option = click.option(
    "--spares",
    type=Whole(0),
    help="So many ranks more, which take the places of ranks that die; 0: the others go on. Open MPI with ULFM.",
)


def save_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a job that saves checkpoints and starts again from them."""
    for option in (
        click.option(
            "--restarts",
            "tries",
            type=Whole(0),
            default=0,
            show_default=True,
            metavar="N",
            help="Start a job that a death has ended again, at most so many times; needs --checkpoint and --every.",
        ),
        click.option("--every", type=Whole(1), metavar="ROUNDS", help="Rounds of each key between two such saves."),
        click.option(
            "--checkpoint",
            metavar="DIR",
            help="Folder in which the store saves itself, and from which the job goes on; with --every.",
        ),
    ):
        command = option(command)
    return command


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the log."""
    for option in (
        click.option("--log-format", type=click.Choice(log.FORMATS), help="Lines for people, or JSON objects."),
        click.option(
            "--log-dir",
            metavar="DIR",
            help="Write these lines to a new folder in this one: a file for each rank, and one of all.",
        ),
        click.option(
            "--log",
            "log_level",
            type=click.Choice(log.LEVELS),
            help="Show what becomes of each rank, in a line for each change.",
        ),
    ):
        command = option(command)
    return command


@click.command("run", cls=Interruptible, context_settings=dict(BEFORE_A_SCRIPT))
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
@log_options
@observe_options
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
@script_argument
def command(
    mpirun: str | None,
    interface: str | None,
    extra: Words,
    dry_run: bool,
    words: Words,
    ranks: int | None,
    workers: int | None,
    checkpoint: str | None,
    tries: int,
    variables: Words,
    log_level: str | None,
    log_dir: str | None,
    log_format: str | None,
    **asked: Any,
) -> None:
    """Start SCRIPT.py ARGS as one MPI job of workers and servers.

    The job has WORKERS + SERVERS ranks, workers first: say how many by -w and -s, or all by -n and the servers by -s.
    The roles reach `mpips.create` as MPIPS_* variables. An uncaught exception of one rank ends the job; the exit code
    is the job's, or 2 where none is started.
    """
    begin_log(log_level, log_dir, log_format)
    watched = {name: asked.pop(name) for name in OBSERVED}
    asked["workers"] = workers_of(ranks, workers, asked["servers"])
    saves = {"checkpoint": os.path.abspath(checkpoint) if checkpoint else checkpoint, "every": asked.pop("every")}
    try:
        options = options_of({**{name: asked.pop(name) for name in (*ROLES, "spares")}, **saves})
        check_recorder(watched)
        if not dry_run:
            check_alone()
        given = variables_of(variables, os.environ)
        machine, launcher = this_machine(), find(mpirun)
        if options.spares >= 0:
            check_spares(launcher, options.spares)
        start = JobStarter(launcher, machine, words, given, interface, extra, **asked)
        job = start.job(options, start.named())
        argv = build(launcher, job, machine)
        restarts.check(options, tries)
        if not dry_run:
            start.check(job, options)
    except (LauncherError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if options.workers % options.clients:
        click.echo(uneven(options.workers, options.clients), err=True)
    if dry_run:
        note_missing(words)
        click.echo(shlex.join(argv))
        return
    check_script(words)
    note_options(words, command.params)
    _warn(job, machine)
    note_place(options, given)
    remote = bool(job.hosts) and job.ranks_here(os.environ) < job.ranks
    with observing(**watched, several=remote):
        code = restarts.until_it_ends(start, start.fitting, options, tries, remote, launcher.flavour)
    if not code:
        folders.forget_job(str(os.getpid()))
    merge_log()
    sys.exit(code)


def begin_log(level: str | None, folder: str | None, form: str | None) -> None:
    """Start the log of this process, and set the variables that make every rank log in the same way.

    Raises UsageError if the options contradict each other or the folder cannot be made.
    """
    if folder == "":
        raise click.UsageError("--log-dir '' names no folder: name one, or leave it out")
    asked = {
        log.LEVEL_VARIABLE: level,
        log.FOLDER_VARIABLE: folder and os.path.abspath(folder),
        log.FORMAT_VARIABLE: form,
    }
    given = {variable: word for variable, word in asked.items() if word}
    log.rank_state.name = "launch"
    try:
        shown, where, _ = log.read_variables({**os.environ, **given})
        if form and not shown:
            raise click.UsageError(
                f"--log-format {form} says how the log looks, and none is written: add --log info, or --log-dir DIR"
            )
        if where:
            os.makedirs(where, mode=0o700, exist_ok=True)
            given[log.FOLDER_VARIABLE] = log.folder_of_job(os.path.abspath(where))
        os.environ.update(given)
        log.configure()
    except log.LogError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        named = f"--log-dir {folder!r}" if folder else f"{log.FOLDER_VARIABLE}={where!r}"
        raise click.UsageError(f"{named} cannot be made: {error.strerror}") from None


def merge_log() -> None:
    """Merge the log files of all ranks into one. If that fails, print a line and go on."""
    _, folder, form = log.read_variables()
    try:
        if folder:
            log.merge(folder, form)
    except OSError as error:
        click.echo(f"mpips: the log in {folder} is not joined into one file: {error.strerror}", err=True)


@dataclass
class JobStarter:
    """Starts the job of one command line. A restart may call it again with other roles."""

    launcher: Launcher
    machine: Machine
    words: Words
    # variables of --env. None: the value that the variable has in this process
    variables: Mapping[str, str | None]
    interface: str | None
    extra: Words
    hostfile: str | None
    topology: str | None
    nics: str | None
    # a problem of this machine that may make the job fail. It is mentioned only if the job fails
    doubt: str = ""
    # the hosts that answered after the last death; None before the first restart
    answering: tuple[Host, ...] | None = None

    def __call__(self, options: Options) -> process.Ended:
        """Run the job once, with these roles. Blocks until it has ended."""
        job = self._known_on_all_hosts(self.job(options, self.named() if self.answering is None else self.answering))
        argv, here = build(self.launcher, job, self.machine), job.ranks_here(os.environ)
        name = click.get_current_context().command_path
        ended = process.run(argv, name=name, roles=_roles(options), here=here, spares=options.spares)
        return ended._replace(sentence=_with_doubt(ended, self.doubt))

    def _known_on_all_hosts(self, job: Job) -> Job:
        """Record the hosts of a job, so that `mpips why` and the like find all its ranks from any of these hosts.

        The record is a file on this host, and a variable of the ranks on the others.
        """
        names = list(dict.fromkeys(block.host for block in job.hosts))
        if not names or not recorder.is_wanted():
            return job
        known = {
            "names": names,
            "launcher": socket.gethostname(),
            "agent": find_agent(self.launcher, self.extra, os.environ),
            "python": sys.executable,
            "path": os.environ.get("PYTHONPATH", ""),
        }
        own, text = str(os.getpid()), json.dumps(known)
        folders.write_hosts(own, text)
        variables = {folders.JOB: own, folders.HOSTS: quote(text, safe="")}
        return job._replace(environment={**job.environment, **variables})

    def check(self, job: Job, options: Options) -> None:
        """Check, before the first start, that this machine and the hosts have what the job needs.

        Makes the folder of the checkpoints, and sets `doubt`. Raises LauncherError or ValueError if the job cannot run.
        """
        check_room(job)
        self.doubt = check_surroundings(self.launcher, job.ranks_here(os.environ))
        if options.checkpoint:
            checkpoints.make(options.checkpoint)
        if self.interface:
            # Imported late because it imports NumPy.
            from mpips.launch import network

            network.check_interface(self.interface, self.launcher, job.hosts, self.machine, self.extra)

    def named(self) -> tuple[Host, ...]:
        """Return the hosts of the host file, or an empty tuple if the user gave none."""
        return read(self.hostfile) if self.hostfile else ()

    def job(self, options: Options, named: tuple[Host, ...]) -> Job:
        """Build the job with these roles on the hosts `named`, or where mpirun chooses if there are none.

        Raises LauncherError or ValueError if the hosts cannot hold the job.
        """
        servers, spares = options.servers, max(options.spares, 0)
        hosts = place(named, options.workers, servers, spares) if named else ()
        if self.nics and not self.topology:
            raise LauncherError("--nics says which NIC serves which level of a --topology: give that, too")
        if self.topology:
            # Imported late because it imports NumPy.
            from mpips.launch.network import place_in_topology

            where = self.topology, (self.nics or "").split(","), self.interface
            hosts = place_in_topology(*where, options, named, self.launcher, self.machine, self.extra)
        ranks = options.workers + servers + spares
        job = Job(
            ranks,
            program(self.words),
            {},
            hosts,
            self.interface,
            self.extra,
            survives=options.spares >= 0,
            exported=tuple(name for name, value in self.variables.items() if value is None),
        )
        # Later values replace earlier ones. What the user has set by --env comes last.
        environment = choose_loopback(job, self.launcher, os.environ) | options.environment()
        environment |= {PREFIX + name.upper(): str(getattr(options, name)) for name in ROLES}
        environment |= {name: os.environ[name] for name in OF_PROCESSES if name in os.environ}
        environment |= {name: os.environ[name] for name in (tracing.VARIABLE,) if name in os.environ}
        environment |= choose_settings(job.busiest, self.machine, os.environ)
        if hosts and "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        environment |= self._place(job, options)
        environment |= {name: value for name, value in self.variables.items() if value is not None}
        return job._replace(environment=environment)

    def _place(self, job: Job, options: Options) -> dict[str, str]:
        """Return the variables from which each rank sets those of torchrun, such as MASTER_ADDR (see `world.PLACE`).

        Empty for a job with servers or spares, because its training ranks are numbered in another way than the ranks of
        the job. Also empty if the user has set RANK or the like; `note_place` warns of that.
        """
        here = world.without_place(os.environ)
        theirs = {**here, **self.variables}
        if options.servers or options.spares > 0 or not theirs.keys().isdisjoint(TOLD_BY_RANK):
            return {}
        address = job.hosts[0].host.rpartition("@")[2] if job.hosts else ""
        if job.ranks_here(os.environ) == job.ranks:
            address = "127.0.0.1"
        elif address == "localhost":
            address = socket.gethostname()
        place = {}
        # Without an address the mpirun of a scheduler chooses the hosts, and the first one is not known here.
        if world.MASTER not in theirs and address:
            place[world.MASTER] = address
        if world.PORT not in theirs and (address or world.MASTER in theirs):
            place[world.PORT] = str(find_free_port())
        given = {name: here[name] for name in (world.MASTER, world.PORT) if job.hosts and name in here}
        return {**given, world.PLACE: world.write_place(place)}

    def fitting(self, options: Options) -> Options:
        """Return the roles that fit on the hosts that answer now. Later starts use these hosts only.

        Raises LauncherError if the job cannot run on them.
        """
        named = self.named()
        self.answering = restarts.answering(named, self.launcher, self.machine, self.extra)
        if self.topology and len(self.answering) < len(named):
            raise LauncherError("a host of the --topology does not answer")
        return restarts.fit(options, self.answering)


def find_free_port() -> int:
    """Return a TCP port of this machine that is free now. Raises LauncherError if there is none in `PORTS`."""
    for _ in range(PORTS.stop - PORTS.start):
        port = random.choice(PORTS)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one, suppress(OSError):
            one.bind(("", port))
            return port
    raise LauncherError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free here: set {world.PORT} to one that is")


def options_of(roles: Mapping[str, int | str | None]) -> Options:
    """Return the options of a job with these roles. All other options come from MPIPS_* variables.

    Raises click.UsageError if one has a wrong value.
    """
    try:
        return read_options(roles)
    except OptionError as error:
        raise click.UsageError(str(error)) from None


def variables_of(given: Sequence[str], environment: Mapping[str, str]) -> dict[str, str | None]:
    """Return the variables that `--env NAME[=VALUE]` asks for, with their values.

    `--env NAME` gives None, and mpirun passes the value on. The value is kept out of mpirun's command line because all
    users can read that.

    Raises:
        LauncherError: A name is not valid, is not set here, or is an option of mpips (MPIPS_*).
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
    """Run `ranks` processes of a command on this machine as an MPI job, and exit with its exit code.

    If the job ends with 0, the exit code is the one that its ranks have asked for by `collectives.terminal.leave`.

    Args:
        ranks: Number of processes.
        words: The script or module and its arguments, as for `mpips run`.
        mpirun: Path of the mpirun; by default the one that `find` finds.
        name: The command to name in "interrupted" after a signal.
    """
    # Imported late: `mpips --help` does not need it.
    from mpips.collectives.terminal import CODE_FILE

    machine = this_machine()
    try:
        left = open_memory()
    except OSError as error:
        raise click.ClickException(f"nowhere to keep the job's exit code: {error.strerror}") from error
    environment = {**choose_settings(ranks, machine, os.environ), CODE_FILE: f"/proc/{os.getpid()}/fd/{left}"}
    # Ranks write to a pipe, so they cannot ask the terminal for its width.
    if sys.stdout.isatty():
        environment["COLUMNS"] = str(os.get_terminal_size(sys.stdout.fileno()).columns)
    job = Job(ranks, program(words), environment)
    try:
        check_alone()
        check_room(job)
        launcher = find(mpirun)
        job = job._replace(environment={**choose_loopback(job, launcher, os.environ), **environment})
        doubt = check_surroundings(launcher, job.ranks_here(os.environ))
        argv = build(launcher, job, machine)
    except LauncherError as error:
        raise click.UsageError(str(error)) from error
    _warn(job, machine)
    ended = process.run(argv, name=name, here=job.ranks_here(os.environ))
    process.tell(_with_doubt(ended, doubt))
    sys.exit(ended.code or int.from_bytes(os.pread(left, 1, 0), "little"))


def _roles(options: Options) -> list[str]:
    """Return the role of each rank in words, such as "worker of client 1", for messages about deaths."""
    of_client = options.workers / options.clients
    clients = [f" of client {int(rank / of_client)}" if options.clients > 1 else "" for rank in range(options.workers)]
    return [f"worker{client}" for client in clients] + ["server"] * options.servers + ["spare"] * options.spares


def check_alone() -> None:
    """Raise LauncherError if this process is itself a rank of a job: every rank would start a whole job."""
    if job := world.started_as(os.environ):
        rank, size = job
        name = click.get_current_context().command_path
        raise LauncherError(
            f"{name} starts the ranks itself, and here it is itself rank {rank} of {size} that a launcher has started: "
            "call it once, without that launcher, or let that launcher start `python -m mpips SCRIPT.py`"
        )


def _with_doubt(ended: process.Ended, doubt: str) -> str:
    """Return the sentence about the end of a job. If the job has failed by itself, append what may be the cause."""
    if not doubt or not ended.code or ended.heard:
        return ended.sentence
    return f"{ended.sentence}; {doubt}" if ended.sentence else f"mpips: {doubt}"


def _warn(job: Job, machine: Machine) -> None:
    one_node = os.environ.get("SLURM_NNODES", os.environ.get("SLURM_JOB_NUM_NODES")) == "1"
    if machine.lacks_scheduler and not job.hosts and not one_node:
        click.echo(f"mpips: {machine.lacks_scheduler}: all ranks start on this machine", err=True)
    if warning := warn_of_crowd(job, machine, os.environ):
        click.echo(warning, err=True)


def note_place(options: Options, given: Mapping[str, str | None]) -> None:
    """Warn on standard error if the user has set RANK or the like, which every rank then gets with the same value."""
    theirs = {**world.without_place(os.environ), **{name: value for name, value in given.items() if value is not None}}
    names = [f"{name}={theirs[name]}" for name in TOLD_BY_RANK if name in theirs]
    if names and options.workers > 1 and not options.servers:
        click.echo(
            f"mpips: {' and '.join(names)} {'is' if len(names) == 1 else 'are'} set here, and so for all ranks: "
            "unset it, and each rank gets its own, as under torchrun",
            err=True,
        )


def note_options(words: Sequence[str], parameters: Sequence[click.Parameter]) -> None:
    """Warn on standard error of options of `mpips run` after the script, if the script seems to read no options.

    The script gets them, so they have no effect.
    """
    if words[0] in ("-m", "-c") or not words[0].endswith(".py"):
        return
    ours = {name for one in parameters if isinstance(one, click.Option) for name in one.opts}
    behind = [word for word in words[1:] if word.partition("=")[0] in ours]
    with open(words[0], "rb") as file:
        if behind and not READS_WORDS.search(file.read()):
            them = "it" if len(behind) == 1 else "them"
            click.echo(
                f"note: {' and '.join(behind)} stands after {words[0]}, so the script gets {them}, and seems to "
                "read no options: those of `mpips run` stand before the script",
                err=True,
            )


class NotPythonError(click.ClickException):
    """The script is not valid Python. click shows this error without the usage line."""

    exit_code = 2


def check_script(words: Sequence[str]) -> None:
    """Check that the script or module is there and can be compiled.

    Raises UsageError if it is missing, and NotPythonError with the line of a syntax error.
    """
    script = words[0]
    if script == "-m":
        # Ranks look in the current folder first. This process must not import its own modules from there, so the
        # folder is taken out again.
        sys.path.insert(0, os.getcwd())
        try:
            exists = _module_exists(words[1])
        finally:
            del sys.path[0]
        if not exists:
            raise click.UsageError(f"there is no module {words[1]!r} for {sys.executable}")
    elif script == "-c":
        _compile(words[1], "<string>")
    elif os.path.isdir(script):
        raise click.UsageError(f"{script!r} is a folder: name a script in it, or a module by -m")
    elif not os.path.isfile(script):
        raise click.UsageError(f"there is no script {script!r} here ({os.getcwd()})")
    else:
        with open(script, "rb") as file:
            source = file.read()
        if kind := "binary program" if source.startswith(ELF) else "shell script" if SHELL.match(source) else "":
            raise click.UsageError(f"{script!r} is a {kind}, and the ranks run Python: start it with mpirun itself")
        if script.endswith(".py") or not (b"\0" in source or zipfile.is_zipfile(script)):
            _compile(source, script)


def note_missing(words: Sequence[str]) -> None:
    """Warn on standard error if the script is not on this machine. It may still be on the machine that runs the job."""
    if words[0] not in ("-m", "-c") and not os.path.isfile(words[0]):
        click.echo(f"note: there is no script {words[0]!r} here ({os.getcwd()}): the job needs it there", err=True)


def _compile(source: str | bytes, name: str) -> None:
    try:
        with warnings.catch_warnings():
            # The ranks will show the warnings.
            warnings.simplefilter("ignore")
            compile(source, name, "exec", dont_inherit=True)
    # compile() raises ValueError if the source contains a NUL byte.
    except (SyntaxError, ValueError) as error:
        lines = "".join(traceback.format_exception_only(error))
        raise NotPythonError(f"no rank is started, as the script is no Python:\n{lines.rstrip()}") from None


def _module_exists(module: str) -> bool:
    """True if Python finds a module of this name. Does not run the packages that contain it, as find_spec would."""
    top, *names = module.split(".")
    spec = importlib.util.find_spec(top) if top else None
    for i, name in enumerate(names):
        if spec is None or spec.submodule_search_locations is None:
            return False
        full = ".".join([top, *names[: i + 1]])
        spec = PathFinder.find_spec(full, list(spec.submodule_search_locations)) if name else None
    return spec is not None


if __name__ == "__main__":
    command()
