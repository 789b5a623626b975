"""`mpips script slurm|lsf|pbs`: print a batch script that runs a job of workers and servers.

For each scheduler, a pure function turns a request into the text of the script. Under srun, processes of Open MPI find
each other by PMIx (`--mpi=pmix`), and processes of MPICH and Intel MPI by PMI-2 (`--mpi=pmi2`). With the wrong option
each process starts as an MPI job of its own, or aborts. Ranks fill the nodes in order. Servers have the highest ranks,
so they are on the last nodes.

With --restarts or --spares, a script for Slurm starts `mpips run` instead of srun, and its allocation stays when a node
fails. With --requeue, Slurm starts the job again after preemption or the loss of a node, but not after the time limit.
So Slurm sends SIGUSR1 to the script before the limit, and the script then requeues its own job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import click
from click.core import ParameterSource

from mpips.collectives.terminal import Interruptible, InterruptibleGroup, Whole, format_examples
from mpips.launch.mpirun import (
    NAMES,
    PMI,
    Flavour,
    LauncherError,
    build_rank_command,
    check_spares,
    describe_end_by_death,
    describe_refused_spares,
    find,
)
from mpips.launch.run import (
    BEFORE_A_SCRIPT,
    count_workers,
    role_options,
    save_options,
    script_argument,
    spares_option,
    warn_of_missing_script,
)
from mpips.store.options import OptionError, Options, check_saves

USES = {
    "slurm": "mpips script slurm -N 4 -s 2 -w 14 train.py --lr 0.1 > job.sh && sbatch job.sh",
    "lsf": "mpips script lsf -N 4 -s 2 -w 14 train.py --lr 0.1 > job.sh && bsub < job.sh",
    "pbs": "mpips script pbs -N 4 -s 2 -w 14 train.py --lr 0.1 > job.sh && qsub job.sh",
}
NAMED = {"slurm": "Slurm (sbatch)", "lsf": "LSF (bsub)", "pbs": "PBS (qsub)"}
COUNT: dict[str, Any] = {"type": Whole(1), "default": 1, "show_default": True}

# seconds before the time limit at which Slurm sends SIGUSR1
SECONDS_BEFORE_THE_LIMIT = 60
# the name of the host file that a script for Slurm writes, quoted for the shell
SLURM_HOSTS = '"hosts-$SLURM_JOB_ID"'
# lines of a script for Slurm
REQUEUE = """trap 'scontrol requeue "$SLURM_JOB_ID"; wait; exit 1' USR1"""
INTEL = ': "${I_MPI_PMI_LIBRARY:?must be the path of the libpmi2.so of Slurm, through which Intel MPI talks to srun}"'


def request_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds the options of a batch script. All schedulers have the same options."""
    for option in (
        click.option(
            "--requeue",
            is_flag=True,
            help="Start the job again if the scheduler ends it or loses a node. Needs --checkpoint.",
        ),
        save_options,
        spares_option,
        click.option(
            "--mpi", type=click.Choice(list(NAMES)), help="The MPI on the cluster; default: the MPI on this machine."
        ),
        click.option("--name", default="mpips", show_default=True, help="Name of the job."),
        click.option("--account", help="Account or project that pays."),
        click.option("--queue", help="Queue or partition."),
        click.option("--gpus", "gpus_per_node", type=Whole(0), default=0, show_default=True, help="GPUs of each node."),
        click.option("--cores", "cores_per_rank", **COUNT, help="Cores of each rank."),
        click.option("--minutes", **{**COUNT, "default": 60}, help="Time limit."),
        click.option("-N", "--nodes", **COUNT, help="Nodes of the job."),
        role_options,
    ):
        command = option(command)
    return command


@click.group("script", cls=InterruptibleGroup)
@request_options
@click.pass_context
def command(context: click.Context, **options: Any) -> None:
    """Write a batch script that runs SCRIPT.py ARGS with servers and workers.

    Options may stand before or after the scheduler's name.
    """
    set_by_user = {
        name: value
        for name, value in options.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    # Options before the scheduler's name become the defaults of the scheduler's own command.
    context.default_map = dict.fromkeys(WRITERS, set_by_user)


def _add_scheduler(scheduler: str) -> None:
    """Add the command for one scheduler to the group `mpips script`."""

    @command.command(
        scheduler,
        cls=Interruptible,
        epilog=format_examples(USES[scheduler]),
        context_settings=dict(BEFORE_A_SCRIPT),
        help=f"Write a batch script for {NAMED[scheduler]} that runs SCRIPT.py ARGS with servers and workers.",
    )
    @request_options
    @script_argument
    def write(
        mpi: str | None,
        servers: int,
        clients: int,
        workers: int | None,
        ranks: int | None,
        masters: str,
        script: tuple[str, ...],
        checkpoint: str | None,
        every: int | None,
        most_restarts: int,
        spares: int | None,
        **others: Any,
    ) -> None:
        workers = count_workers(ranks, workers, servers)
        try:
            options = Options(
                servers=servers,
                clients=clients,
                workers=workers,
                masters=masters,
                checkpoint=checkpoint or "",
                every=every or 0,
                spares=-1 if spares is None else spares,
            )
            check_saves(options)
            if mpi:
                flavour = cast(Flavour, mpi)
            else:
                launcher = find()
                flavour = launcher.flavour
                if options.spares >= 0:
                    check_spares(launcher, options.spares)
            request = BatchRequest(options=options, script=script, flavour=flavour, restarts=most_restarts, **others)
            click.echo(WRITERS[scheduler](request), nl=False)
            warn_of_missing_script(script)
        except (LauncherError, OptionError, BatchRequestError) as error:
            raise click.UsageError(str(error)) from error


class BatchRequestError(ValueError):
    """The request contradicts itself, or has a value that no scheduler accepts."""


class BatchRequest(NamedTuple):
    """A job to write a batch script for, independent of the scheduler."""

    name: str
    options: Options
    # the script or module and its arguments
    script: tuple[str, ...]
    nodes: int
    # the time limit
    minutes: int
    flavour: Flavour
    queue: str | None = None
    account: str | None = None
    cores_per_rank: int = 1
    gpus_per_node: int = 0
    restarts: int = 0
    # True: the scheduler starts the job again after it has ended the job or lost a node
    requeue: bool = False

    @property
    def ranks(self) -> int:
        return self.options.workers + self.options.servers + max(self.options.spares, 0)

    @property
    def ranks_per_node(self) -> int:
        return -(-self.ranks // self.nodes)


def write_slurm(request: BatchRequest) -> str:
    """Return the script for sbatch. Raises BatchRequestError."""
    _check_request(request)
    options = {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks": request.ranks,
        "ntasks-per-node": request.ranks_per_node,
        "cpus-per-task": request.cores_per_rank,
        "time": _format_walltime(request.minutes),
        "output": "%x-%j.out",
        "partition": request.queue,
        "account": request.account,
        "gpus-per-node": request.gpus_per_node or None,
    }
    directives = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    # "B:" sends the signal to the shell that runs the script. With "append", the output of earlier runs is kept when
    # the job starts again.
    if request.requeue:
        directives += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
        directives.append(f"#SBATCH --signal=B:USR1@{SECONDS_BEFORE_THE_LIMIT}")
    # With --no-kill, Slurm keeps the allocation when a node fails.
    if request.restarts or request.options.spares >= 0:
        directives.append("#SBATCH --no-kill")
        slots = f"sed 's/$/ slots={request.ranks_per_node}/'"
        lines = [f'scontrol show hostnames "$SLURM_JOB_NODELIST" | {slots} > {SLURM_HOSTS}']
        lines.append(_write_mpips_run(request, SLURM_HOSTS))
    else:
        exports = sorted(request.options.environment().items())
        lines = [INTEL] if request.flavour == "intel" else []
        lines += [*(f"export {name}={shlex.quote(value)}" for name, value in exports)]
        lines.append(shlex.join(build_srun(request)))
    # The last line starts the job, and must do so in the background. A shell runs a trap at once during `wait`, but
    # during any other command only after the command has ended.
    if request.requeue:
        lines = [*lines[:-1], REQUEUE, f"{lines[-1]} &", "wait $!"]
    return _join_script(request, directives, lines)


def build_srun(request: BatchRequest) -> list[str]:
    """Return the srun command that starts the ranks inside an allocation. The failure of a rank ends all ranks."""
    return [
        "srun",
        f"--mpi={PMI[request.flavour]}",
        f"--ntasks={request.ranks}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        f"--cpus-per-task={request.cores_per_rank}",
        *build_rank_command(request.script, "python"),
    ]


def write_lsf(request: BatchRequest) -> str:
    """Return the script for `bsub < SCRIPT`. Raises BatchRequestError.

    The script starts `mpips run` with LSF's host file $LSB_DJOB_HOSTFILE, which has a line for each slot.
    """
    _check_request(request)
    resources = f"span[ptile={request.ranks_per_node}]"
    # Ask for affinity only if ranks need several cores. LSF would never start the job on hosts that are not set up for
    # affinity.
    if request.cores_per_rank > 1:
        resources += f" affinity[core({request.cores_per_rank})]"
    directives = [
        f"#BSUB -J {request.name}",
        f"#BSUB -n {request.ranks}",
        f'#BSUB -R "{resources}"',
        f"#BSUB -W {request.minutes // 60}:{request.minutes % 60:02d}",
        f"#BSUB -o {request.name}-%J.out",
    ]
    if request.queue:
        directives.append(f"#BSUB -q {request.queue}")
    if request.account:
        directives.append(f"#BSUB -P {request.account}")
    if request.gpus_per_node:
        directives.append(f'#BSUB -gpu "num={request.gpus_per_node}"')
    if request.requeue:
        directives.append("#BSUB -r")
    return _join_script(request, directives, [_write_mpips_run(request, '"$LSB_DJOB_HOSTFILE"')])


def write_pbs(request: BatchRequest) -> str:
    """Return the script for `qsub SCRIPT` of OpenPBS and PBS Pro. Raises BatchRequestError.

    The script starts `mpips run` with the host file $PBS_NODEFILE.
    """
    _check_request(request)
    chunk = f"ncpus={request.ranks_per_node * request.cores_per_rank}:mpiprocs={request.ranks_per_node}"
    if request.gpus_per_node:
        chunk += f":ngpus={request.gpus_per_node}"
    directives = [
        f"#PBS -N {request.name}",
        # Pass on the submitter's environment. Without this option the shell would not find mpips.
        "#PBS -V",
        f"#PBS -l select={request.nodes}:{chunk}",
        "#PBS -l place=scatter",
        f"#PBS -l walltime={_format_walltime(request.minutes)}",
        "#PBS -j oe",
        f"#PBS -r {'y' if request.requeue else 'n'}",
    ]
    if request.queue:
        directives.append(f"#PBS -q {request.queue}")
    if request.account:
        directives.append(f"#PBS -A {request.account}")
    lines = ['cd "$PBS_O_WORKDIR"', _write_mpips_run(request, '"$PBS_NODEFILE"')]
    return _join_script(request, directives, lines)


WRITERS = {"slurm": write_slurm, "lsf": write_lsf, "pbs": write_pbs}


def _check_request(request: BatchRequest) -> None:
    """Raise BatchRequestError if no script can be written for this request."""
    if request.nodes > request.ranks:
        raise BatchRequestError(f"{request.nodes} nodes are more than the {request.ranks} ranks of the job")
    if not re.fullmatch(r"[A-Za-z][\w.-]{0,14}", request.name):
        raise BatchRequestError(
            f"{request.name!r} is not a job name: use a letter, then at most 14 letters, digits, '_', '.', '-'"
        )
    if (request.restarts or request.requeue) and not (request.options.checkpoint and request.options.every):
        option = f"--restarts {request.restarts}" if request.restarts else "--requeue"
        raise BatchRequestError(f"{option} needs --checkpoint and --every: a job goes on from what its store has saved")
    if request.options.spares >= 0 and request.flavour != "openmpi":
        name, why = NAMES[request.flavour], describe_end_by_death(request.flavour)
        raise BatchRequestError(describe_refused_spares(request.options.spares, name, why))
    for value in (request.queue, request.account):
        if value is not None and not re.fullmatch(r"[\w.@:-]+", value):
            raise BatchRequestError(f"{value!r} is not the name of a queue or account")


def _format_walltime(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _write_mpips_run(request: BatchRequest, hostfile: str) -> str:
    """Return the `mpips run` command for the hosts of the allocation. `hostfile` is already quoted for the shell."""
    options = request.options
    roles = f"--servers {options.servers} --clients {options.clients} --workers {options.workers}"
    saves = ""
    if options.checkpoint:
        folder = shlex.quote(options.checkpoint)
        saves = f" --restarts {request.restarts} --checkpoint {folder} --every {options.every}"
    spares = f" --spares {options.spares}" if options.spares >= 0 else ""
    arguments = f"{roles}{spares} --masters {options.masters}{saves} --hostfile {hostfile}"
    return f"mpips run {arguments} {shlex.join(request.script)}"


def _join_script(request: BatchRequest, directives: list[str], lines: list[str]) -> str:
    """Return the text of a script: first the directives for the scheduler, then the lines for the shell.

    The script ends at the first command that fails. Each rank gets as many compute threads as it has cores.
    """
    threads = f"export OMP_NUM_THREADS={request.cores_per_rank}"
    return "\n".join(["#!/bin/bash", *directives, "", "set -e", threads, *lines]) + "\n"


for _name in WRITERS:
    _add_scheduler(_name)


if __name__ == "__main__":
    command()
