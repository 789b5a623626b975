"""`mpips doctor`: what this machine has and lacks for a job, each line [ok], or what to do, in one screen.

Under a launcher (`srun -n 4 mpips doctor`) its own ranks are examined, otherwise two ranks are started.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from collectives.terminal.console import Interruptible, OutFile, console, write_text
from launch.doctor.judge import Check, judge
from launch.doctor.survey import look

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
SIGNS = {True: "[green]\\[ok][/]", None: "[dim]\\[--][/]", False: "[red]\\[!!][/]"}


def show(checks: list[Check], console: Console) -> None:
    """Prints a line a check, and below it what to do."""
    for check in checks:
        console.print(f"{SIGNS[check.ok]} {check.name + ':':24}{escape(check.found)}", highlight=False, soft_wrap=True)
        if check.ok is False:
            console.print(f"     [bold]{escape(check.advice)}[/]", highlight=False, soft_wrap=True)


@click.command("doctor", cls=Interruptible)
@click.option("--json", "path", type=OutFile(), help="Write the checks to this file, too ('-': to the terminal).")
@click.option("--interface", help="Is this network interface here? As for `mpips run --interface`.")
def command(path: Path | None, interface: str | None) -> None:
    """Check Python, MPI, memory, GPU, cores, scheduler and network. Exit code 1 if something must be done."""
    checks = judge({**look(), "interface": interface})
    if int(next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0")):
        return
    text = json.dumps([check._asdict() for check in checks], indent=1)
    if path == Path("-"):
        click.echo(text)
    else:
        show(checks, console())
        if path:
            write_text(path, text + "\n")
    if any(check.ok is False for check in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    command()
