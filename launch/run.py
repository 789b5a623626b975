"""`mpips run`: one MPI job of workers and servers; and `start`, which other commands use for their ranks."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shlex
import socket
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from ipaddress import IPv4Network
from typing import Any, NoReturn

import click

from launch import network, room, watched
from launch.command import Job, Launcher, LauncherError, Machine, build, find, program, this_machine
from launch.hosts import Placed, place, read
from mpips.options import PREFIX, OptionError, Options, uneven
from mpips.options import read as read_options

ROLES = ("servers", "clients", "workers", "masters")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def threads(ranks: int, machine: Machine, environment: Mapping[str, str]) -> dict[str, str]:
    """Compute threads of each rank: the cores shared out, so that ranks do not fight, or what the user set."""
    given = {name: environment[name] for name in THREADS if name in environment}
    return given or {"OMP_NUM_THREADS": str(max(1, machine.cores // ranks))}


def settings(ranks: int, machine: Machine, environment: Mapping[str, str]) -> dict[str, str]:
    """What each rank needs to compute and to copy well, but for what the user set."""
    from collectives.machine.caches import long_copies  # `mpips --help` does without

    return {**threads(ranks, machine, environment), **long_copies(environment)}


def start(ranks: int, script: Sequence[str], mpirun: str | None = None, name: str = "") -> NoReturn:
    """Runs, and ends with, an MPI job of `ranks` processes on this machine; its exit code becomes the job's, or what
    the ranks have left with (`collectives.terminal.console.leave`). `name`: the command that a signal interrupts."""
    from collectives.terminal.console import CODE_FILE  # `mpips --help` does without

    machine = this_machine()
    left = os.memfd_create("code")
    environment = {**settings(ranks, machine, os.environ), CODE_FILE: f"/proc/{os.getpid()}/fd/{left}"}
    if sys.stdout.isatty():  # ranks cannot see how wide it is
        environment["COLUMNS"] = str(os.get_terminal_size(sys.stdout.fileno()).columns)
    job = Job(ranks, program(script), environment)
    try:
        room.check(job, room.here(), os.environ)
        argv = build(find(mpirun), job, machine)
    except LauncherError as error:
        raise click.UsageError(str(error)) from error
    _warn(job, machine)
    code = watched.wait(argv, name=name)
    sys.exit(code or int.from_bytes(os.pread(left, 1, 0), "little"))


def _warn(job: Job, machine: Machine) -> None:
    if warning := room.crowd(job, machine, os.environ):
        click.echo(warning, err=True)


class Interruptible(click.Command):
    """A command that after Ctrl-C, before its job has started, ends as the others do (`terminal.console`)."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(f"\n{ctx.command_path}: interrupted", err=True)
            sys.exit(watched.INTERRUPTED)


@click.command(
    "run", cls=Interruptible, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option(
    "-s", "--servers", type=click.IntRange(0), default=0, show_default=True, help="Server processes; 0 is pure MPI."
)
@click.option(
    "-w", "--workers", type=click.IntRange(1), required=True, help="Workers in all, as many a client, or nearly."
)
@click.option(
    "-c", "--clients", type=click.IntRange(1), default=1, show_default=True, help="MPI clients of an mpi_* store."
)
@click.option(
    "--masters",
    type=click.Choice(["one", "all"]),
    default="one",
    show_default=True,
    help="Who of a client talks to the servers: its rank 0, or every worker with its own shard.",
)
@click.option("--hostfile", type=click.Path(), help="Hosts, one a line: `node1 slots=4` or `node1:4`.")
@click.option("--topology", help="Order the hosts by their addresses in it: bcube:3,2, star:9 or fattree:4.")
@click.option("--nics", help="With --topology: the NIC of each level, level 0 first, as eth1,eth2.")
@click.option("--interface", help="Network interface, or subnet, for MPI's TCP traffic between hosts.")
@click.option("--mpirun", help="The mpirun to use instead of the one found.")
@click.option("--mpi-arg", "extra", multiple=True, help="A further word for mpirun; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Print the command and stop.")
@click.argument(
    "script", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py|-m MODULE [ARGS]...",
    is_eager=True, callback=lambda context, parameter, words: _script(words),
)  # fmt: skip
def command(
    servers: int,
    workers: int,
    clients: int,
    masters: str,
    hostfile: str | None,
    topology: str | None,
    nics: str | None,
    interface: str | None,
    mpirun: str | None,
    extra: tuple[str, ...],
    dry_run: bool,
    script: tuple[str, ...],
) -> None:
    """Start SCRIPT.py ARGS as one MPI job of workers and servers.

    The job has WORKERS + SERVERS ranks, workers first. The roles reach `mpips.create` as MPIPS_* variables. An
    uncaught exception of one rank ends the job; the exit code is the job's, or 2 where none is started.
    """
    try:
        options = options_of({"servers": servers, "clients": clients, "workers": workers, "masters": masters})
        machine = this_machine()
        launcher = find(mpirun)
        hosts = place(read(hostfile), workers, servers) if hostfile else ()
        if nics and not topology:
            raise LauncherError("--nics says which NIC serves which level of a --topology: give that, too")
        if topology:
            from launch.mapped import Wanted, placed  # NumPy only where it is needed

            wanted = Wanted(topology, tuple((nics or "").split(",")), interface)
            hosts = placed(wanted, options, read(hostfile) if hostfile else (), launcher, machine, extra)
        job = _job(options, script, hosts, machine, interface, extra)
        argv = build(launcher, job, machine)
        if not dry_run:
            room.check(job, room.here(), os.environ)
        if interface and not dry_run:
            check_interface(interface, launcher, hosts, machine, extra)
    except (LauncherError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if workers % clients:
        click.echo(uneven(workers, clients), err=True)
    if dry_run:
        click.echo(shlex.join(argv))
        return
    _check_script(script)
    _warn(job, machine)
    watched.run(argv, click.get_current_context().command_path)


def options_of(roles: Mapping[str, int | str]) -> Options:
    """The options of a job with these roles, the others by variables; click.UsageError says what is wrong with one."""
    try:
        return read_options(roles)
    except OptionError as error:
        raise click.UsageError(str(error)) from None


def _job(
    options: Options,
    script: Sequence[str],
    hosts: Sequence[Placed],
    machine: Machine,
    interface: str | None,
    extra: Sequence[str],
) -> Job:
    ranks = options.workers + options.servers
    busiest = max((block.ranks for block in hosts), default=ranks)
    roles = {PREFIX + name.upper(): str(getattr(options, name)) for name in ROLES}
    environment = {**options.environment(), **roles, **settings(busiest, machine, os.environ)}
    if hosts and "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return Job(ranks, program(script), environment, tuple(hosts), interface, tuple(extra))


def check_interface(
    interface: str, launcher: Launcher, hosts: Sequence[Placed], machine: Machine, extra: Sequence[str] = ()
) -> None:
    """LauncherError, with those there are, where no machine of the job can have this interface.

    A subnet, as 10.0.0.0/8, stands for the interfaces with an address in it. One that is here passes. One that is not
    may be on the hosts: they are asked.
    """
    names = [name for _, name in socket.if_nameindex()]
    words = [_subnet(word) if "/" in word else word for word in interface.split(",")]
    lacking = [word for word in words if isinstance(word, IPv4Network) or word not in names]
    if any(isinstance(word, IPv4Network) for word in lacking):
        report = network.here()
        lacking = [word for word in lacking if not _has(report, word)]
        if lacking and not hosts:
            raise LauncherError(_absence(report, lacking[0]))
    if not lacking:
        return
    if not hosts:
        raise LauncherError(f"there is no network interface {lacking[0]!r} here: there are {', '.join(names)}")
    for report in network.ask(launcher, list(dict.fromkeys(block.host for block in hosts)), machine, extra):
        missing = [word for word in lacking if not _has(report, word)]
        if missing:
            raise LauncherError(_absence(report, missing[0]))


def _subnet(word: str) -> IPv4Network:
    try:
        return IPv4Network(word, strict=False)
    except ValueError as error:
        raise LauncherError(f"--interface {word!r} is no IPv4 subnet: write it as 10.0.0.0/8") from error


def _has(report: network.Report, word: str | IPv4Network) -> bool:
    if isinstance(word, str):
        return word in report.nics
    return any(address.ip in word for addresses in report.nics.values() for address in addresses)


def _absence(report: network.Report, word: str | IPv4Network) -> str:
    if isinstance(word, str):
        return f"{report.host} has no interface {word!r} with an IPv4 address: it has {', '.join(report.nics)}"
    there = ", ".join(f"{address} ({name})" for name, addresses in report.nics.items() for address in addresses)
    return f"{report.host} has no IPv4 address in the subnet {word}: it has {there}"


def _script(words: tuple[str, ...]) -> tuple[str, ...]:
    """The script and its words. What stands where a script should, and is none, is an option that there is not."""
    words = words[1:] if words[:1] == ("--",) else words
    if not words:
        raise click.UsageError(
            "no script is named: SCRIPT.py, -m MODULE, or, as -c alone means --clients, a line of Python by -- -c LINE"
        )
    word = words[0].partition("=")[0]
    if word.startswith("-") and word not in ("-m", "-c"):
        known = [name for option in command.params for name in option.opts if name.startswith("--")]
        raise click.NoSuchOption(word, possibilities=difflib.get_close_matches(word, known, cutoff=0.7))
    if word in ("-m", "-c") and len(words) < 2:
        raise click.UsageError(f"{word} needs an argument")
    return words


def _check_script(script: Sequence[str]) -> None:
    """A script that is missing, or no Python, would be an error of all ranks; say it before they start."""
    if script[0] == "-m":
        sys.path.insert(0, os.getcwd())  # where ranks look first
        if not _exists(script[1]):
            raise click.UsageError(f"there is no module {script[1]!r} for {sys.executable}")
    elif script[0] == "-c":
        _compile(script[1], "<string>")
    elif os.path.isdir(script[0]):
        raise click.UsageError(f"{script[0]!r} is a folder: name a script in it, or a module by -m")
    elif not os.path.isfile(script[0]):
        raise click.UsageError(f"there is no script {script[0]!r} here ({os.getcwd()})")
    elif script[0].endswith(".py"):  # others may be archives
        with open(script[0], "rb") as file:
            _compile(file.read(), script[0])


class NoPython(click.ClickException):
    """A refusal, shown without the usage."""

    exit_code = 2


def _compile(source: str | bytes, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks give them
            compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL in the text
        lines = "".join(traceback.format_exception_only(error))
        raise NoPython(f"no rank is started, as the script is no Python:\n{lines.rstrip()}") from None


def _exists(module: str) -> bool:
    """Is there a module of this name? Packages on the way to it are looked into, not run."""
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
