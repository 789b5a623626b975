"""`mpips script SCHEDULER`: writes a batch script to the terminal."""

from __future__ import annotations

from typing import Any, cast

import click

from collectives.terminal.console import Interruptible
from launch.batch import lsf, pbs, slurm
from launch.batch.request import Request, RequestError
from launch.mpirun import NAMES, Flavour, LauncherError, find
from launch.run import role_options
from mpips.options import OptionError, Options

WRITERS = {"slurm": slurm.script, "lsf": lsf.script, "pbs": pbs.script}
COUNT: dict[str, Any] = {"type": click.IntRange(1), "default": 1, "show_default": True}


@click.command(
    "script", cls=Interruptible, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@role_options
@click.option("-N", "--nodes", **COUNT)
@click.option("--minutes", **{**COUNT, "default": 60}, help="Time limit.")
@click.option("--cores", "cores_per_rank", **COUNT, help="Cores of each rank.")
@click.option(
    "--gpus", "gpus_per_node", type=click.IntRange(0), default=0, show_default=True, help="GPUs of each node."
)
@click.option("--queue", help="Queue or partition.")
@click.option("--account", help="Account or project that pays.")
@click.option("--name", default="mpips", show_default=True, help="Name of the job.")
@click.option("--mpi", type=click.Choice(list(NAMES)), help="The MPI there; default: the one here.")
@click.argument("scheduler", type=click.Choice(list(WRITERS)))
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT.py|-m MODULE [ARGS]...")
def command(
    scheduler: str, mpi: str | None, servers: int, clients: int, workers: int, masters: str, **wanted: Any
) -> None:
    """Write a batch script for SCHEDULER that runs SCRIPT.py ARGS with servers and workers.

    Options stand before SCHEDULER: `mpips script -N 4 -s 2 -w 14 slurm train.py > job.sh`.
    """
    try:
        options = Options(servers=servers, clients=clients, workers=workers, masters=masters)
        flavour = cast(Flavour, mpi) if mpi else find().flavour
        click.echo(WRITERS[scheduler](Request(options=options, flavour=flavour, **wanted)), nl=False)
    except (LauncherError, OptionError, RequestError) as error:
        raise click.UsageError(str(error)) from error


if __name__ == "__main__":
    command()
