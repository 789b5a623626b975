"""`mpips lab`: the commands that make, use and end an emulated cluster on this machine."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from mpips.collectives.simulator.topology import parse, parse_rate
from mpips.collectives.terminal import InterruptibleGroup, OutFile, Whole, format_examples, show_table, write_text
from mpips.launch.lab import client, job
from mpips.launch.lab.client import PATIENCE, NetworkWatch
from mpips.launch.lab.kernel import find_missing
from mpips.launch.lab.layout import lay_out
from mpips.launch.mpirun import LauncherError
from mpips.launch.running import process

Arguments = tuple[str, ...]
name_option = click.option("--name", default="lab", show_default=True, help="Name of the lab; several can be up.")
program_argument = click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
BEFORE_A_PROGRAM: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@contextlib.contextmanager
def reported_errors() -> Iterator[None]:
    """Context manager that turns exceptions of labs and launchers into error messages of the command."""
    try:
        yield
    except (client.LabError, LauncherError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _without_dashes(program: Arguments) -> Arguments:
    return program[1:] if program[0] == "--" else program


@click.group("lab", cls=InterruptibleGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Emulate a cluster on this machine: network namespaces as hosts, bridges as switches, every link at a given rate.

    The machine's own network is not touched. A single process, the keeper, owns the lab, and the lab ends when the
    keeper ends. The page "The lab" of the documentation says what a lab needs.
    """


@command.command(epilog=format_examples("mpips lab up star:4 --rate 100mbit", "mpips lab up bcube:3,2 --name cube"))
@name_option
@click.option(
    "--rate",
    "speed",
    default="100mbit",
    show_default=True,
    help="Rate of every link in each direction: kbit, mbit, gbit.",
)
@click.argument("topology")
def up(topology: str, speed: str, name: str) -> None:
    """Build TOPOLOGY: star:HOSTS, bcube:PORTS,LEVELS or fattree:PORTS."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9.-]{0,40}", name):
        raise click.UsageError(f"--name {name!r}: letters, digits, '.' and '-' only, at most 41")
    try:
        plan = lay_out(parse(topology, parse_rate(speed)))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if missing := find_missing():
        raise click.ClickException("no lab can be made here:\n" + "\n".join(f"  - {line}" for line in missing))
    with reported_errors():
        client.detach(client.up(name, plan))
    nics, switches = len(plan.hosts[0].nics), len(plan.switches)
    click.echo(
        f"lab {name}: {plan.topology}, {len(plan.hosts)} hosts with {nics} NIC{'s'[: nics > 1]} of {speed}, "
        f"{switches} switch{'es' if switches > 1 else ''}; `mpips lab down --name {name}` ends it"
    )


@command.command(
    context_settings=BEFORE_A_PROGRAM,
    epilog=format_examples(
        "mpips lab run -n 4 -- python train.py",
        "mpips lab run -n 8 --per-host 2 -- python -m collectives.benchmark allreduce",
    ),
)
@name_option
@click.option("-n", "--ranks", type=Whole(1), required=True, help="Ranks of the job.")
@click.option("--per-host", type=Whole(1), default=1, show_default=True, help="Ranks on each host.")
@click.option("--mpirun", help="The mpirun to use instead of the one found (Open MPI or MPICH).")
@click.option("--mpi-arg", "extra", multiple=True, help="A further argument for mpirun; may be repeated.")
@click.option(
    "--patience",
    type=click.FloatRange(0),
    default=PATIENCE,
    show_default=True,
    help="Seconds after which a job is ended if its network is broken: a NIC is down, or a connection is lost. 0: "
    "never. The death of a host ends the job at once.",
)
@program_argument
def run(
    name: str,
    ranks: int,
    per_host: int,
    mpirun: str | None,
    extra: tuple[str, ...],
    patience: float,
    program: Arguments,
) -> None:
    """Run PROGRAM as one MPI job across the lab's hosts. The exit code is the exit code of the job."""
    with reported_errors():
        argv = client.job_command(name, ranks, _without_dashes(program), per_host=per_host, mpirun=mpirun, extra=extra)
        watch = NetworkWatch(name, -(-ranks // per_host), patience or math.inf)
    os.environ[job.MARK_VARIABLE] = mark = uuid.uuid4().hex
    end = process.run(argv, watch)
    process.print_error(end.sentence)
    # An error means that the lab has ended, and that the processes of the job have ended with the lab.
    with contextlib.suppress(client.LabError, OSError):
        client.ask(name, {"do": "clear", "job": mark})
    # Check once more, because a host may have died after the last check. If all processes of a host were killed, Open
    # MPI does not notice the death: it assumes that the ranks have ended well.
    watch()
    if watch.dead or (end.code and watch.reason):
        raise click.ClickException(watch.reason)
    raise SystemExit(end.code)


@command.command("exec", context_settings=BEFORE_A_PROGRAM, epilog=format_examples("mpips lab exec h0 -- ip route"))
@name_option
@click.argument("host")
@program_argument
def execute_on_host(name: str, host: str, program: Arguments) -> None:
    """Run PROGRAM only on HOST. The host `launcher` has the bridges and runs mpirun."""
    with reported_errors():
        argv = client.host_command(name, host, _without_dashes(program))
    os.execvp(argv[0], argv)


@command.command(epilog=format_examples("mpips lab status", "mpips lab status --json -"))
@name_option
@click.option(
    "--json", "path", type=OutFile(dash=True), help="Write the status as JSON to this file; -: to the terminal."
)
def status(name: str, path: Path | None) -> None:
    """Show the hosts, their NICs and rates, and the bytes that have passed each NIC since the last reset."""
    with reported_errors():
        lab = client.ask(name, {"do": "status"})
    text = json.dumps(lab, indent=1) + "\n"
    if path == Path("-"):
        click.echo(text, nl=False)
        return
    if path:
        write_text(path, text)
    from rich.table import Table

    table = Table(title=f"lab {lab['name']}: {lab['topology']}")
    for title in ("host", "vip", "NIC", "level", "switch"):
        table.add_column(title)
    for title in ("Mbit/s", "sent bytes", "received bytes", "dropped"):
        table.add_column(title, justify="right")
    table.add_column("state")
    for host in lab["hosts"]:
        for nic in host["nics"]:
            moved = [f"{nic[key]:,}" for key in ("sent", "received", "dropped")]
            state = "dead" if not host["alive"] else "up" if nic["up"] else "down"
            names = (host["name"], host["vip"], nic["name"], str(nic["level"]), nic["switch"])
            table.add_row(*names, f"{nic['rate'] / 1e6:g}", *moved, state)
    show_table(table)


@command.command(epilog=format_examples("mpips lab reset"))
@name_option
def reset(name: str) -> None:
    """Set the byte counters of all NICs to zero."""
    with reported_errors():
        client.ask(name, {"do": "reset"})


@command.command(epilog=format_examples("mpips lab link h2 d0 down", "mpips lab link h2 all up --share 0.1"))
@name_option
@click.option(
    "--share",
    type=click.FloatRange(0.001, 1),
    default=1.0,
    show_default=True,
    help="Share of its rate that the NIC has from now on, in each direction.",
)
@click.argument("host")
@click.argument("nic")
@click.argument("state", type=click.Choice(["up", "down"]))
def link(name: str, host: str, nic: str, state: str, share: float) -> None:
    """Set a NIC of HOST up or down, and set the share of its rate that it has. NIC `all` stands for all its NICs."""
    with reported_errors():
        client.ask(name, {"do": "link", "host": host, "nic": nic, "up": state == "up", "share": share})


@command.command("list", epilog=format_examples("mpips lab list"))
def list_labs() -> None:
    """List the labs that are up."""
    with reported_errors():
        names = client.list_labs()
    if not names:
        # Print this on standard error, because scripts read the names of labs from standard output.
        click.echo("no lab is up: mpips lab up makes one", err=True)
    for name in names:
        try:
            lab, keeper = client.ask(name, {"do": "describe"}), client.find_keeper(name)
        except client.LabError as error:
            click.echo(f"{name}: {error}")
        else:
            click.echo(f"{name}: {lab['topology']}, {len(lab['hosts'])} hosts, keeper {keeper}")


@command.command(epilog=format_examples("mpips lab down", "mpips lab down --all"))
@name_option
@click.option("--all", "every", is_flag=True, help="End all of this user's labs.")
def down(name: str, every: bool) -> None:
    """End the lab and every process in it."""
    with reported_errors():
        labs = client.list_labs()
    if not every and name not in labs:
        raise click.ClickException(f"no lab named {name!r} is up" + (f": there are {', '.join(labs)}" if labs else ""))
    ended, failures = [], []
    for each in labs if every else [name]:
        try:
            client.down(each)
            ended.append(each)
        except client.LabError as error:
            failures.append(str(error))
    if ended or not failures:
        click.echo(f"ended: {', '.join(ended) or 'none was up'}")
    if failures:
        raise click.ClickException("; ".join(failures))


if __name__ == "__main__":
    command(prog_name="mpips lab")
