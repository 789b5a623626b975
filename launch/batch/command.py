"""`mpips script slurm|lsf|pbs`: writes a batch script to the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import click
from click.core import ParameterSource

from collectives.terminal.console import Interruptible, InterruptibleGroup
from collectives.terminal.help import examples
from launch import script, survival
from launch.batch import lsf, pbs, slurm
from launch.batch.request import Request, RequestError
from launch.mpirun import NAMES, Flavour, LauncherError, find
from launch.run import role_options, save_options, spares_option, workers_of
from mpips.store.options import OptionError, Options, check_saves

WRITERS = {"slurm": slurm.script, "lsf": lsf.script, "pbs": pbs.script}
USES = {
    "slurm": "mpips script slurm -N 4 -s 2 -w 14 train.py --lr 0.1 > job.sh && sbatch job.sh",
    "lsf": "mpips script lsf -N 4 -s 2 -w 14 train.py --lr 0.1 > job.sh && bsub < job.sh",
    "pbs": "mpips script pbs -N 4 -s 2 -w 14 train.py --lr 0.1 > job.sh && qsub job.sh",
}
NAMED = {"slurm": "Slurm (sbatch)", "lsf": "LSF (bsub)", "pbs": "PBS (qsub)"}
COUNT: dict[str, Any] = {"type": click.IntRange(1), "default": 1, "show_default": True}


def request_options(command: Callable[..., None]) -> Callable[..., None]:
    """What a batch script asks for, whoever the scheduler is."""
    for option in (
        click.option("--requeue", is_flag=True,
                     help="Start again where the scheduler ends the job, or loses a node; needs --checkpoint."),
        save_options,
        spares_option,
        click.option("--mpi", type=click.Choice(list(NAMES)), help="The MPI there; default: the one here."),
        click.option("--name", default="mpips", show_default=True, help="Name of the job."),
        click.option("--account", help="Account or project that pays."),
        click.option("--queue", help="Queue or partition."),
        click.option("--gpus", "gpus_per_node", type=click.IntRange(0), default=0, show_default=True,
                     help="GPUs of each node."),
        click.option("--cores", "cores_per_rank", **COUNT, help="Cores of each rank."),
        click.option("--minutes", **{**COUNT, "default": 60}, help="Time limit."),
        click.option("-N", "--nodes", **COUNT, help="Nodes of the job."),
        role_options,
    ):  # fmt: skip
        command = option(command)
    return command


@click.group("script", cls=InterruptibleGroup)
@request_options
@click.pass_context
def command(context: click.Context, **wanted: Any) -> None:
    """Write a batch script that runs SCRIPT.py ARGS with servers and workers.

    Options stand before or behind the scheduler's name.
    """
    given = {
        name: value
        for name, value in wanted.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    context.default_map = dict.fromkeys(WRITERS, given)


def _writer(scheduler: str) -> None:
    """Adds the command of one scheduler to the group."""

    @command.command(
        scheduler, cls=Interruptible, epilog=examples(USES[scheduler]), context_settings=dict(script.BEFORE_A_SCRIPT),
        help=f"Write a batch script for {NAMED[scheduler]} that runs SCRIPT.py ARGS with servers and workers.",
    )  # fmt: skip
    @request_options
    @script.argument
    def write(
        mpi: str | None, servers: int, clients: int, workers: int | None, ranks: int | None, masters: str,
        words: tuple[str, ...], checkpoint: str | None, every: int | None, tries: int, spares: int | None,
        **wanted: Any,
    ) -> None:  # fmt: skip
        workers = workers_of(ranks, workers, servers)
        try:
            options = Options(servers=servers, clients=clients, workers=workers, masters=masters,
                              checkpoint=checkpoint or "", every=every or 0,
                              spares=-1 if spares is None else spares)  # fmt: skip
            check_saves(options)
            flavour = cast(Flavour, mpi) if mpi else _flavour_here(options.spares)
            request = Request(options=options, program=words, flavour=flavour, restarts=tries, **wanted)
            click.echo(WRITERS[scheduler](request), nl=False)
            script.note_missing(words)
        except (LauncherError, OptionError, RequestError) as error:
            raise click.UsageError(str(error)) from error


def _flavour_here(spares: int) -> Flavour:
    """Return the MPI of this machine; raise LauncherError where it cannot have the spares asked for."""
    launcher = find()
    if spares >= 0:
        survival.check(launcher, spares)
    return launcher.flavour


for _name in WRITERS:
    _writer(_name)


if __name__ == "__main__":
    command()
