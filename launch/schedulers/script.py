"""`mpips script SCHEDULER`: writes a batch script to the terminal."""

from __future__ import annotations

from typing import cast

import click

from collectives.terminal.console import Interruptible
from launch.command import Flavour, LauncherError, find
from launch.schedulers import lsf, pbs, slurm
from launch.schedulers.request import Request, RequestError
from mpips.options import OptionError, Options

WRITERS = {"slurm": slurm.script, "lsf": lsf.script, "pbs": pbs.script}


@click.command(
    "script", cls=Interruptible, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.option("-s", "--servers", type=click.IntRange(0), default=0, show_default=True, help="Server processes.")
@click.option("-w", "--workers", type=click.IntRange(1), required=True, help="Workers in all.")
@click.option("-c", "--clients", type=click.IntRange(1), default=1, show_default=True, help="MPI clients.")
@click.option("--masters", type=click.Choice(["one", "all"]), default="one", show_default=True)
@click.option("-N", "--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--minutes", type=click.IntRange(1), default=60, show_default=True, help="Time limit.")
@click.option("--cores", type=click.IntRange(1), default=1, show_default=True, help="Cores of each rank.")
@click.option("--gpus", type=click.IntRange(0), default=0, show_default=True, help="GPUs of each node.")
@click.option("--queue", help="Queue or partition.")
@click.option("--account", help="Account or project that pays.")
@click.option("--name", default="mpips", show_default=True, help="Name of the job.")
@click.option("--mpi", type=click.Choice(["openmpi", "mpich", "intel"]), help="The MPI there; default: the one here.")
@click.argument("scheduler", type=click.Choice(list(WRITERS)))
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT.py|-m MODULE [ARGS]...")
def command(
    scheduler: str,
    program: tuple[str, ...],
    servers: int,
    workers: int,
    clients: int,
    masters: str,
    nodes: int,
    minutes: int,
    cores: int,
    gpus: int,
    queue: str | None,
    account: str | None,
    name: str,
    mpi: str | None,
) -> None:
    """Write a batch script for SCHEDULER that runs SCRIPT.py ARGS with servers and workers.

    Options stand before SCHEDULER: `mpips script -N 4 -s 2 -w 14 slurm train.py > job.sh`.
    """
    try:
        options = Options(servers=servers, clients=clients, workers=workers, masters=masters)
        flavour = cast(Flavour, mpi) if mpi else find().flavour
        request = Request(name, options, program, nodes, minutes, flavour, queue, account, cores, gpus)
        click.echo(WRITERS[scheduler](request), nl=False)
    except (LauncherError, OptionError, RequestError) as error:
        raise click.UsageError(str(error)) from error


if __name__ == "__main__":
    command()
