"""`mpips run`: start a script as one MPI job of workers and servers.

If every rank would report the same error, such as a syntax error in the script, `mpips run` reports it once, before any
rank starts. Other commands call the function `start` for their option `--ranks`.
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
    describe_crowd,
    this_machine,
)
from mpips.launch.mpirun import (
    Job,
    Launcher,
    LauncherError,
    Machine,
    build,
    build_rank_command,
    check_spares,
    find,
    find_agent,
)
from mpips.launch.observe.options import OBSERVED, check_recorder, observe_options, observing
from mpips.launch.running import process
from mpips.store import world
from mpips.store.checkpoint import folder as checkpoints
from mpips.store.options import OF_PROCESSES, PREFIX, OptionError, Options, uneven
from mpips.store.options import read as read_options

Arguments = tuple[str, ...]
PYTHON = re.compile(r"python[\d.]*")
ELF = b"\x7fELF"
# Matches the first line of a shell script, but not of a Python script that pip has written. If the path of Python is
# too long for the first line, pip names a shell in the first line, and the second line runs Python.
SHELL = re.compile(rb"#!.*\b(ba|da|k|z)?sh\b(?!.*\n.*python)")
# A script that reads its command line contains one of these words, whatever library it uses to parse the arguments.
READS_ARGUMENTS = re.compile(rb"arg|pars|option|flag|click|typer|fire|hydra|tyro|absl|cli", re.IGNORECASE)
# The ports to choose from. The kernel uses ports from 32768 on for outgoing connections.
PORTS = range(20000, 32768)
# Variables of torchrun that differ from rank to rank. If the user sets one, all ranks get the same value.
PER_RANK_VARIABLES = (world.RANK, world.SIZE, world.LOCAL_RANK)
ROLES = ("servers", "clients", "workers", "masters")


def _parse_script(ctx: click.Context, parameter: click.Parameter, words: Sequence[str]) -> tuple[str, ...]:
    """Check the words `SCRIPT.py ARGS`, `-m MODULE ARGS` or `-c LINE`, and return them without a leading `--`.

    Raises UsageError for any other words.
    """
    script = tuple(words[1:] if words[:1] == ("--",) else words)
    if not script:
        raise click.UsageError(
            "no script is named: SCRIPT.py, -m MODULE, or, as -c alone means --clients, a line of Python by -- -c LINE"
        )
    if script[0] in ("-m", "-c"):
        if len(script) < 2:
            raise click.UsageError(f"{script[0]} needs an argument")
    elif (option := script[0].partition("=")[0]).startswith("-"):
        # This is an unknown option before the script. Because of ignore_unknown_options, click has not refused it.
        known = [name for each in ctx.command.params for name in each.opts if name.startswith("--")]
        raise click.NoSuchOption(option, possibilities=difflib.get_close_matches(option, known, cutoff=0.7))
    elif PYTHON.fullmatch(os.path.basename(script[0])):
        raise click.UsageError(f"leave out {script[0]!r}: the ranks run the script that follows it by {sys.executable}")
    return script


# The click settings of a command that takes `script_argument`. With these settings, options after the script's name
# belong to the script.
BEFORE_A_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
script_argument = click.argument(
    "script",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="SCRIPT.py|-m MODULE [ARGS]...",
    is_eager=True,
    callback=_parse_script,
)


def role_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds the options for the roles of ranks.

    `count_workers` computes the number of workers from three of them: --ranks, --workers and --servers.
    """
    for option in (
        click.option(
            "--masters",
            type=click.Choice(["one", "all"]),
            default="one",
            show_default=True,
            help="Which workers of a client talk to the servers: its rank 0, or all, each with its own shard.",
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
            help="Number of workers of all clients together.",
        ),
        click.option("-n", "--ranks", type=Whole(1), help="Number of workers and servers together, in place of -w."),
        click.option(
            "-s",
            "--servers",
            default=0,
            show_default=True,
            type=Whole(0),
            help="Number of server processes; 0 is pure MPI.",
        ),
    ):
        command = option(command)
    return command


def count_workers(ranks: int | None, workers: int | None, servers: int) -> int:
    """Return the number of workers of a job, from the values of --ranks, --workers and --servers.

    Raises click.UsageError if these options leave no worker or contradict each other.
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
    help="Extra ranks that replace ranks that die; 0: the remaining ranks go on. Needs Open MPI with ULFM.",
)


def save_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds the options of a job that saves checkpoints and starts again from them."""
    for option in (
        click.option(
            "--restarts",
            "most_restarts",
            type=Whole(0),
            default=0,
            show_default=True,
            metavar="N",
            help="After a death has ended the job, start it again, at most N times. Needs --checkpoint and --every.",
        ),
        click.option("--every", type=Whole(1), metavar="ROUNDS", help="Rounds of each key between two checkpoints."),
        click.option(
            "--checkpoint",
            metavar="DIR",
            help="Folder for the store's checkpoints, from which the job goes on. Needs --every.",
        ),
    ):
        command = option(command)
    return command


def log_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds the options for logging: --log, --log-dir and --log-format."""
    for option in (
        click.option("--log-format", type=click.Choice(log.FORMATS), help="Lines for people, or JSON objects."),
        click.option(
            "--log-dir",
            metavar="DIR",
            help="Write the log to a new folder in this one: a file for each rank, and one file of all ranks.",
        ),
        click.option(
            "--log",
            "log_level",
            type=click.Choice(log.LEVELS),
            help="Print a line whenever the state of a rank changes.",
        ),
    ):
        command = option(command)
    return command


@click.command("run", cls=Interruptible, context_settings=dict(BEFORE_A_SCRIPT))
@role_options
@spares_option
@click.option("--hostfile", type=click.Path(), help="Hosts, one a line: `node1 slots=4` or `node1:4`.")
@click.option("--topology", help="Order the hosts by their addresses in a topology: bcube:3,2, star:9 or fattree:4.")
@click.option("--nics", help="With --topology: the NIC of each level, level 0 first, as eth1,eth2.")
@click.option("--interface", help="Network interface, or subnet, for MPI's TCP traffic between hosts.")
@click.option("--mpirun", help="The mpirun to use instead of the one found.")
@click.option("--mpi-arg", "extra", multiple=True, help="A further argument for mpirun; may be repeated.")
@click.option(
    "-x",
    "--env",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set this variable for all ranks, on every host; without a value, to the value it has here. May be repeated.",
)
@save_options
@log_options
@observe_options
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
@script_argument
def command(
    mpirun: str | None,
    interface: str | None,
    extra: Arguments,
    dry_run: bool,
    script: Arguments,
    ranks: int | None,
    workers: int | None,
    checkpoint: str | None,
    most_restarts: int,
    variables: Arguments,
    log_level: str | None,
    log_dir: str | None,
    log_format: str | None,
    **others: Any,
) -> None:
    """Start SCRIPT.py ARGS as one MPI job of workers and servers.

    The workers are the first ranks. Give the number of servers by -s, and either the number of workers by -w or the
    number of all ranks by -n. `mpips.create` reads the roles from MPIPS_* variables. An uncaught exception of one rank
    ends the job. The exit code is the exit code of the job, or 2 if no job is started.
    """
    begin_log(log_level, log_dir, log_format)
    warn_of_late_options(script, command.params)
    observed = {name: others.pop(name) for name in OBSERVED}
    others["workers"] = count_workers(ranks, workers, others["servers"])
    saves = {"checkpoint": os.path.abspath(checkpoint) if checkpoint else checkpoint, "every": others.pop("every")}
    try:
        options = make_options({**{name: others.pop(name) for name in (*ROLES, "spares")}, **saves})
        check_recorder(observed)
        if not dry_run:
            check_alone()
        environment = parse_variables(variables, os.environ)
        machine, launcher = this_machine(), find(mpirun)
        if options.spares >= 0:
            check_spares(launcher, options.spares)
        start = JobStarter(launcher, machine, script, environment, interface, extra, **others)
        job = start.build_job(options, start.read_hosts())
        argv = build(launcher, job, machine)
        restarts.check(options, most_restarts)
        if not dry_run:
            start.check(job, options)
    except (LauncherError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if options.workers % options.clients:
        click.echo(uneven(options.workers, options.clients), err=True)
    if dry_run:
        warn_of_missing_script(script)
        click.echo(shlex.join(argv))
        return
    check_script(script)
    _print_warnings(job, machine)
    warn_of_rank_variables(options, environment)
    remote = bool(job.hosts) and job.ranks_here(os.environ) < job.ranks
    with observing(**observed, several=remote):
        code = restarts.run_with_restarts(start, start.fit_to_hosts, options, most_restarts, remote, launcher.flavour)
    if not code:
        folders.forget_job(str(os.getpid()))
    merge_log()
    sys.exit(code)


def begin_log(level: str | None, folder: str | None, form: str | None) -> None:
    """Start the log of this process, and set the environment variables that make every rank log in the same way.

    Raises UsageError if the options contradict each other or the folder cannot be made.
    """
    if folder == "":
        raise click.UsageError("--log-dir '' names no folder: name one, or leave it out")
    options = {
        log.LEVEL_VARIABLE: level,
        log.FOLDER_VARIABLE: folder and os.path.abspath(folder),
        log.FORMAT_VARIABLE: form,
    }
    variables = {variable: value for variable, value in options.items() if value}
    log.rank_state.name = "launch"
    try:
        chosen_level, where, _ = log.read_variables({**os.environ, **variables})
        if form and not chosen_level:
            raise click.UsageError(
                f"--log-format {form} says how the log looks, and none is written: add --log info, or --log-dir DIR"
            )
        if where:
            os.makedirs(where, mode=0o700, exist_ok=True)
            variables[log.FOLDER_VARIABLE] = log.folder_of_job(os.path.abspath(where))
        os.environ.update(variables)
        log.configure()
    except log.LogError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        named = f"--log-dir {folder!r}" if folder else f"{log.FOLDER_VARIABLE}={where!r}"
        raise click.UsageError(f"{named} cannot be made: {error.strerror}") from None


def merge_log() -> None:
    """Merge the log files of all ranks into one file. If the merge fails, print a line and continue."""
    _, folder, form = log.read_variables()
    try:
        if folder:
            log.merge(folder, form)
    except OSError as error:
        click.echo(f"mpips: the log in {folder} is not joined into one file: {error.strerror}", err=True)


@dataclass
class JobStarter:
    """Starts the job of one `mpips run` command. A restart calls this object again, perhaps with other roles."""

    launcher: Launcher
    machine: Machine
    # the script or module and its arguments
    script: Arguments
    # The variables of --env. If the value is None, the ranks get the value that the variable has in this process.
    variables: Mapping[str, str | None]
    interface: str | None
    extra: Arguments
    hostfile: str | None
    topology: str | None
    nics: str | None
    # A problem of this machine that may make the job fail, or "". The problem is printed only if the job fails.
    possible_cause: str = ""
    # the hosts that answered after the last failed run; None if the hosts were not asked yet
    answering: tuple[Host, ...] | None = None

    def __call__(self, options: Options) -> process.JobEnd:
        """Run the job once, with the roles in `options`. Blocks until the job has ended."""
        hosts = self.read_hosts() if self.answering is None else self.answering
        job = self._record_hosts(self.build_job(options, hosts))
        argv, ranks_here = build(self.launcher, job, self.machine), job.ranks_here(os.environ)
        name = click.get_current_context().command_path
        end = process.run(argv, name=name, roles=_list_roles(options), ranks_here=ranks_here, spares=options.spares)
        return end._replace(sentence=_add_cause(end, self.possible_cause))

    def _record_hosts(self, job: Job) -> Job:
        """Record the hosts of a job. `mpips why` and similar commands can then find its ranks from any of these hosts.

        The record is written to a file on this host. The ranks on other hosts get it in an environment variable.
        """
        names = list(dict.fromkeys(block.host for block in job.hosts))
        if not names or not recorder.is_wanted():
            return job
        record = {
            "names": names,
            "launcher": socket.gethostname(),
            "agent": find_agent(self.launcher, self.extra, os.environ),
            "python": sys.executable,
            "path": os.environ.get("PYTHONPATH", ""),
        }
        name, text = str(os.getpid()), json.dumps(record)
        folders.write_hosts(name, text)
        variables = {folders.JOB: name, folders.HOSTS: quote(text, safe="")}
        return job._replace(environment={**job.environment, **variables})

    def check(self, job: Job, options: Options) -> None:
        """Check, before the first start, that this machine and the hosts have what the job needs.

        Also makes the folder for checkpoints, and sets `possible_cause`. Raises LauncherError or ValueError if the job
        cannot run.
        """
        check_room(job)
        self.possible_cause = check_surroundings(self.launcher, job.ranks_here(os.environ))
        if options.checkpoint:
            checkpoints.make(options.checkpoint)
        if self.interface:
            # Imported late because it imports NumPy.
            from mpips.launch import network

            network.check_interface(self.interface, self.launcher, job.hosts, self.machine, self.extra)

    def read_hosts(self) -> tuple[Host, ...]:
        """Return the hosts of the host file, or an empty tuple if the user gave none."""
        return read(self.hostfile) if self.hostfile else ()

    def build_job(self, options: Options, hosts: tuple[Host, ...]) -> Job:
        """Build the job with the roles in `options`. If `hosts` is empty, mpirun chooses the hosts.

        Raises LauncherError or ValueError if the hosts cannot hold the job.
        """
        servers, spares = options.servers, max(options.spares, 0)
        blocks = place(hosts, options.workers, servers, spares) if hosts else ()
        if self.nics and not self.topology:
            raise LauncherError("--nics says which NIC serves which level of a --topology: give that, too")
        if self.topology:
            # Imported late because it imports NumPy.
            from mpips.launch.network import place_in_topology

            nics = (self.nics or "").split(",")
            blocks = place_in_topology(
                self.topology, nics, self.interface, options, hosts, self.launcher, self.machine, self.extra
            )
        ranks = options.workers + servers + spares
        job = Job(
            ranks,
            build_rank_command(self.script),
            {},
            blocks,
            self.interface,
            self.extra,
            survives=options.spares >= 0,
            exported=tuple(name for name, value in self.variables.items() if value is None),
        )
        # Later settings replace earlier settings, so the variables of --env come last.
        environment = choose_loopback(job, self.launcher, os.environ) | options.environment()
        environment |= {PREFIX + name.upper(): str(getattr(options, name)) for name in ROLES}
        environment |= {name: os.environ[name] for name in OF_PROCESSES if name in os.environ}
        environment |= {name: os.environ[name] for name in (tracing.VARIABLE,) if name in os.environ}
        environment |= choose_settings(job.busiest, self.machine, os.environ)
        if blocks and "PYTHONPATH" in os.environ:
            environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
        environment |= self._torchrun_variables(job, options)
        environment |= {name: value for name, value in self.variables.items() if value is not None}
        return job._replace(environment=environment)

    def _torchrun_variables(self, job: Job, options: Options) -> dict[str, str]:
        """Return variables from which each rank derives the variables of torchrun, such as MASTER_ADDR (`world.PLACE`).

        Returns none for a job with servers or spares, because the numbers of its workers differ from their ranks. Also
        returns none if the user has set RANK or a similar variable. `warn_of_rank_variables` warns of such a variable.
        """
        inherited = world.without_place(os.environ)
        set_by_user = {**inherited, **self.variables}
        if options.servers or options.spares > 0 or not set_by_user.keys().isdisjoint(PER_RANK_VARIABLES):
            return {}
        address = job.hosts[0].host.rpartition("@")[2] if job.hosts else ""
        if job.ranks_here(os.environ) == job.ranks:
            address = "127.0.0.1"
        elif address == "localhost":
            address = socket.gethostname()
        place = {}
        # The address is "" if a scheduler chooses the hosts, because the first host is then unknown.
        if world.MASTER not in set_by_user and address:
            place[world.MASTER] = address
        if world.PORT not in set_by_user and (address or world.MASTER in set_by_user):
            place[world.PORT] = str(find_free_port())
        exported = {name: inherited[name] for name in (world.MASTER, world.PORT) if job.hosts and name in inherited}
        return {**exported, world.PLACE: world.write_place(place)}

    def fit_to_hosts(self, options: Options) -> Options:
        """Find the hosts that answer now, and return the options with the numbers of ranks that fit on these hosts.

        Later starts use only these hosts. Raises LauncherError if the job cannot run on them.
        """
        hosts = self.read_hosts()
        self.answering = restarts.find_answering_hosts(hosts, self.launcher, self.machine, self.extra)
        if self.topology and len(self.answering) < len(hosts):
            raise LauncherError("a host of the --topology does not answer")
        return restarts.reduce_roles(options, self.answering)


def find_free_port() -> int:
    """Return a TCP port of this machine that is free now. Raises LauncherError if it finds no free port in `PORTS`."""
    for _ in range(PORTS.stop - PORTS.start):
        port = random.choice(PORTS)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener, suppress(OSError):
            listener.bind(("", port))
            return port
    raise LauncherError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free here: set {world.PORT} to one that is")


def make_options(roles: Mapping[str, int | str | None]) -> Options:
    """Return the options of a job with these roles. All other options come from the MPIPS_* environment variables.

    Raises click.UsageError if an option has a wrong value.
    """
    try:
        return read_options(roles)
    except OptionError as error:
        raise click.UsageError(str(error)) from None


def parse_variables(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, str | None]:
    """Parse the arguments `NAME[=VALUE]` of `--env`. Return a dict: name -> value.

    For `--env NAME` the value in the dict is None. mpirun then passes on the value from its own environment. So the
    value does not appear in mpirun's command line, which all users can read.

    Raises:
        LauncherError: A name is not valid, has no value and is not set in `environment`, or begins with MPIPS_.
    """
    variables: dict[str, str | None] = {}
    for argument in arguments:
        name, assigned, value = argument.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise LauncherError(
                f"--env {argument!r} names no variable: write NAME=VALUE, or NAME alone for its value here"
            )
        if name.startswith(PREFIX):
            raise LauncherError(
                f"--env {argument}: {PREFIX}* variables reach all ranks by themselves: set it before `mpips run`"
            )
        if not assigned and name not in environment:
            raise LauncherError(f"--env {argument}: no variable {name} is set here: write {name}=VALUE")
        variables[name] = value if assigned else None
    return variables


def start(ranks: int, script: Sequence[str], mpirun: str | None = None, name: str = "") -> NoReturn:
    """Run a script as an MPI job on this machine, and exit with the exit code of the job.

    If mpirun ends with 0, the exit code is the code that the ranks have set by `collectives.terminal.leave`.

    Args:
        ranks: Number of processes.
        script: The script or module and its arguments, as for `mpips run`.
        mpirun: Path of the mpirun. By default `find` chooses it.
        name: The name of the command, for the message after a signal has interrupted the job.
    """
    # Imported late, because `mpips --help` does not need this module.
    from mpips.collectives.terminal import CODE_FILE

    machine = this_machine()
    try:
        exit_code_file = open_memory()
    except OSError as error:
        raise click.ClickException(f"nowhere to keep the job's exit code: {error.strerror}") from error
    environment = {**choose_settings(ranks, machine, os.environ), CODE_FILE: f"/proc/{os.getpid()}/fd/{exit_code_file}"}
    # Ranks write to a pipe, so they cannot ask the terminal for its width.
    if sys.stdout.isatty():
        environment["COLUMNS"] = str(os.get_terminal_size(sys.stdout.fileno()).columns)
    job = Job(ranks, build_rank_command(script), environment)
    try:
        check_alone()
        check_room(job)
        launcher = find(mpirun)
        job = job._replace(environment={**choose_loopback(job, launcher, os.environ), **environment})
        possible_cause = check_surroundings(launcher, job.ranks_here(os.environ))
        argv = build(launcher, job, machine)
    except LauncherError as error:
        raise click.UsageError(str(error)) from error
    _print_warnings(job, machine)
    end = process.run(argv, name=name, ranks_here=job.ranks_here(os.environ))
    process.print_error(_add_cause(end, possible_cause))
    sys.exit(end.code or int.from_bytes(os.pread(exit_code_file, 1, 0), "little"))


def _list_roles(options: Options) -> list[str]:
    """Return a description of each rank's role, such as "worker of client 1". Messages about deaths use it."""
    per_client = options.workers / options.clients
    clients = [f" of client {int(rank / per_client)}" if options.clients > 1 else "" for rank in range(options.workers)]
    return [f"worker{client}" for client in clients] + ["server"] * options.servers + ["spare"] * options.spares


def check_alone() -> None:
    """Raise LauncherError if this process is already a rank of a job. Otherwise each rank would start a whole job."""
    if job := world.started_as(os.environ):
        rank, size = job
        name = click.get_current_context().command_path
        raise LauncherError(
            f"{name} starts the ranks itself, and here it is itself rank {rank} of {size} that a launcher has started: "
            "call it once, without that launcher, or let that launcher start `python -m mpips SCRIPT.py`"
        )


def _add_cause(end: process.JobEnd, possible_cause: str) -> str:
    """Return the message about the end of a job. If the job has failed without a signal, append the possible cause."""
    if not possible_cause or not end.code or end.signal:
        return end.sentence
    return f"{end.sentence}; {possible_cause}" if end.sentence else f"mpips: {possible_cause}"


def _print_warnings(job: Job, machine: Machine) -> None:
    one_node = os.environ.get("SLURM_NNODES", os.environ.get("SLURM_JOB_NUM_NODES")) == "1"
    if machine.missing_scheduler and not job.hosts and not one_node:
        click.echo(f"mpips: {machine.missing_scheduler}: all ranks start on this machine", err=True)
    if warning := describe_crowd(job, machine, os.environ):
        click.echo(warning, err=True)


def warn_of_rank_variables(options: Options, variables: Mapping[str, str | None]) -> None:
    """Warn on standard error if the user has set RANK or a similar variable, because every rank then gets this value.

    `variables` are the variables of --env.
    """
    assigned = {name: value for name, value in variables.items() if value is not None}
    set_by_user = {**world.without_place(os.environ), **assigned}
    names = [f"{name}={set_by_user[name]}" for name in PER_RANK_VARIABLES if name in set_by_user]
    if names and options.workers > 1 and not options.servers:
        click.echo(
            f"mpips: {' and '.join(names)} {'is' if len(names) == 1 else 'are'} set here, and so for all ranks: "
            "unset it, and each rank gets its own, as under torchrun",
            err=True,
        )


def warn_of_late_options(script: Sequence[str], parameters: Sequence[click.Parameter]) -> None:
    """Warn on standard error if options of `mpips run` stand after a script that seems to read no options.

    Arguments after the script's name belong to the script, so `mpips run` does not see such options. `parameters` are
    the parameters of `mpips run`.
    """
    if not script[0].endswith(".py") or not os.path.isfile(script[0]):
        return
    options = {name for each in parameters if isinstance(each, click.Option) for name in each.opts}
    late = [argument for argument in script[1:] if argument.partition("=")[0] in options]
    with open(script[0], "rb") as file:
        if late and not READS_ARGUMENTS.search(file.read()):
            them = "it" if len(late) == 1 else "them"
            click.echo(
                f"note: after {script[0]} comes {' and '.join(late)}, so the script gets {them}, but it does not seem "
                f"to read options: write options of `mpips run` before {script[0]}",
                err=True,
            )


class NotPythonError(click.ClickException):
    """The script is not valid Python. click shows this error without the usage line."""

    exit_code = 2


def check_script(script: Sequence[str]) -> None:
    """Check that the script or module exists and can be compiled.

    Raises UsageError if the script or module is missing or is not Python. Raises NotPythonError, with the line, for a
    syntax error.
    """
    path = script[0]
    if path == "-m":
        # Ranks look for modules in the current folder first. This process must not import its own modules from the
        # current folder, so the folder is removed from sys.path again.
        sys.path.insert(0, os.getcwd())
        try:
            exists = _module_exists(script[1])
        finally:
            del sys.path[0]
        if not exists:
            raise click.UsageError(f"there is no module {script[1]!r} for {sys.executable}")
    elif path == "-c":
        _compile(script[1], "<string>")
    elif os.path.isdir(path):
        raise click.UsageError(f"{path!r} is a folder: name a script in it, or a module by -m")
    elif not os.path.isfile(path):
        raise click.UsageError(f"there is no script {path!r} here ({os.getcwd()})")
    else:
        with open(path, "rb") as file:
            source = file.read()
        if kind := "binary program" if source.startswith(ELF) else "shell script" if SHELL.match(source) else "":
            raise click.UsageError(f"{path!r} is a {kind}, and the ranks run Python: start it with mpirun itself")
        if path.endswith(".py") or not (b"\0" in source or zipfile.is_zipfile(path)):
            _compile(source, path)


def warn_of_missing_script(script: Sequence[str]) -> None:
    """Warn on standard error if the script is not on this machine. The machine that runs the job may have it."""
    if script[0] not in ("-m", "-c") and not os.path.isfile(script[0]):
        click.echo(f"note: there is no script {script[0]!r} here ({os.getcwd()}): the job needs it there", err=True)


def _compile(source: str | bytes, name: str) -> None:
    try:
        with warnings.catch_warnings():
            # The ranks will show the script's warnings.
            warnings.simplefilter("ignore")
            compile(source, name, "exec", dont_inherit=True)
    # compile() raises ValueError if the source contains a NUL byte.
    except (SyntaxError, ValueError) as error:
        lines = "".join(traceback.format_exception_only(error))
        raise NotPythonError(f"no rank is started: the script is not valid Python:\n{lines.rstrip()}") from None


def _module_exists(module: str) -> bool:
    """True if Python finds a module of this name. Unlike find_spec, this does not run the module's parent packages."""
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
