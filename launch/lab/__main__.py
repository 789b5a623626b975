"""`mpips lab`: an emulated cluster on this machine, of namespaces, bridges and rate limits, for a real MPI job."""

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

Words = tuple[str, ...]
named = click.option("--name", default="lab", show_default=True, help="Which lab; several can stand side by side.")
program_argument = click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
BEFORE_A_PROGRAM: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Context manager that turns errors of labs and launchers into an error message of the command."""
    try:
        yield
    except (client.LabError, LauncherError, ValueError) as error:
        raise click.ClickException(str(error)) from error


def _without_dashes(program: Words) -> Words:
    return program[1:] if program[0] == "--" else program


@click.group("lab", cls=InterruptibleGroup, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Several hosts on this machine: network namespaces as hosts, bridges as switches, every link at a given rate.

    Nothing touches the machine's own network, and all of it ends with one process. What it takes is on
    the page "The lab" of the documents.
    """


@command.command(epilog=format_examples("mpips lab up star:4 --rate 100mbit", "mpips lab up bcube:3,2 --name cube"))
@named
@click.option(
    "--rate", "speed", default="100mbit", show_default=True, help="Of every link, each direction: kbit, mbit, gbit."
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
    if lacking := find_missing():
        raise click.ClickException("no lab can be made here:\n" + "\n".join(f"  - {line}" for line in lacking))
    with sentences():
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
@named
@click.option("-n", "--ranks", type=Whole(1), required=True, help="Ranks of the job.")
@click.option("--per-host", type=Whole(1), default=1, show_default=True, help="Ranks on each host.")
@click.option("--mpirun", help="The mpirun to use instead of the one found (Open MPI or MPICH).")
@click.option("--mpi-arg", "extra", multiple=True, help="A further word for mpirun; may be repeated.")
@click.option(
    "--patience",
    type=click.FloatRange(0),
    default=PATIENCE,
    show_default=True,
    help="Seconds after which a job ends whose network is broken: a NIC down, a connection lost. 0: never. A host that "
    "dies ends it at once.",
)
@program_argument
def run(
    name: str, ranks: int, per_host: int, mpirun: str | None, extra: tuple[str, ...], patience: float, program: Words
) -> None:
    """Run PROGRAM as one MPI job across the lab's hosts; the exit code is the job's."""
    words = _without_dashes(program)
    with sentences():
        argv = client.job_command(name, ranks, words, per_host=per_host, mpirun=mpirun, extra=extra)
        watch = NetworkWatch(name, -(-ranks // per_host), patience or math.inf)
    os.environ[job.MARK_VARIABLE] = own = uuid.uuid4().hex
    ended = process.run(argv, watch)
    process.tell(ended.sentence)
    # If the lab has gone, the processes of the job have gone with it.
    with contextlib.suppress(client.LabError, OSError):
        client.ask(name, {"do": "clear", "job": own})
    # Look once more: a host may have died at the very end, and if all processes of a host were killed Open MPI takes it
    # for one that has ended well.
    watch()
    if watch.dead or (ended.code and watch.reason):
        raise click.ClickException(watch.reason)
    raise SystemExit(ended.code)


@command.command("exec", context_settings=BEFORE_A_PROGRAM, epilog=format_examples("mpips lab exec h0 -- ip route"))
@named
@click.argument("host")
@program_argument
def execute_on_host(name: str, host: str, program: Words) -> None:
    """Run PROGRAM on HOST alone; `launcher` is where bridges and mpirun are."""
    with sentences():
        argv = client.host_command(name, host, _without_dashes(program))
    os.execvp(argv[0], argv)


@command.command(epilog=format_examples("mpips lab status", "mpips lab status --json -"))
@named
@click.option("--json", "path", type=OutFile(dash=True), help="Write it as JSON to this file, or to - for the screen.")
def status(name: str, path: Path | None) -> None:
    """Show hosts, NICs, rates, and bytes through every NIC since the last reset."""
    with sentences():
        found = client.ask(name, {"do": "status"})
    text = json.dumps(found, indent=1) + "\n"
    if path == Path("-"):
        click.echo(text, nl=False)
        return
    if path:
        write_text(path, text)
    from rich.table import Table

    table = Table(title=f"lab {found['name']}: {found['topology']}")
    for title in ("host", "vip", "NIC", "level", "switch"):
        table.add_column(title)
    for title in ("Mbit/s", "sent bytes", "received bytes", "dropped"):
        table.add_column(title, justify="right")
    table.add_column("state")
    for host in found["hosts"]:
        for nic in host["nics"]:
            moved = [f"{nic[key]:,}" for key in ("sent", "received", "dropped")]
            state = "dead" if not host["alive"] else "up" if nic["up"] else "down"
            words = (host["name"], host["vip"], nic["name"], str(nic["level"]), nic["switch"])
            table.add_row(*words, f"{nic['rate'] / 1e6:g}", *moved, state)
    show_table(table)


@command.command(epilog=format_examples("mpips lab reset"))
@named
def reset(name: str) -> None:
    """Count bytes from zero again."""
    with sentences():
        client.ask(name, {"do": "reset"})


@command.command(epilog=format_examples("mpips lab link h2 d0 down", "mpips lab link h2 all up --share 0.1"))
@named
@click.option(
    "--share",
    type=click.FloatRange(0.001, 1),
    default=1.0,
    show_default=True,
    help="Of its rate, that the NIC has from now on, each direction.",
)
@click.argument("host")
@click.argument("nic")
@click.argument("state", type=click.Choice(["up", "down"]))
def link(name: str, host: str, nic: str, state: str, share: float) -> None:
    """Set a NIC of a host, or all, down, or up again as it was, or with a part of its rate."""
    with sentences():
        client.ask(name, {"do": "link", "host": host, "nic": nic, "up": state == "up", "share": share})


@command.command("list", epilog=format_examples("mpips lab list"))
def list_labs() -> None:
    """List the labs that are up."""
    with sentences():
        names = client.list_labs()
    if not names:
        # On standard error, because scripts read the names of labs from standard output.
        click.echo("no lab is up: mpips lab up makes one", err=True)
    for name in names:
        try:
            found, keeper = client.ask(name, {"do": "describe"}), client.keeper_process(name)
        except client.LabError as error:
            click.echo(f"{name}: {error}")
        else:
            click.echo(f"{name}: {found['topology']}, {len(found['hosts'])} hosts, keeper {keeper}")


@command.command(epilog=format_examples("mpips lab down", "mpips lab down --all"))
@named
@click.option("--all", "every", is_flag=True, help="End all of this user's labs.")
def down(name: str, every: bool) -> None:
    """End the lab and every process in it; nothing stays behind."""
    with sentences():
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
