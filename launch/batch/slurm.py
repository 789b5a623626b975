"""Where a batch script for Slurm is written, for sbatch, and the srun line in it.

Open MPI's processes find each other by PMIx (`--mpi=pmix`), those of MPICH and Intel MPI by PMI-2 (`--mpi=pmi2`); with
the wrong one each starts as a world of size 1 or aborts. Ranks fill the nodes in order, so the servers, numbered last,
are on the last nodes.

A job that is to start again after a death, or to go on with its spares, is started by `mpips run` in place of srun, in
an allocation that outlives its nodes. Slurm's own `--requeue` is for preemption and lost nodes alone: before the time
limit the script gets SIGUSR1, and asks for it.
"""

from __future__ import annotations

import shlex

from launch.batch.request import Request, checked, mpips_run, text, threads, walltime
from launch.mpirun import Flavour, program

SECONDS_BEFORE_THE_LIMIT = 60
HOSTS = '"hosts-$SLURM_JOB_ID"'
REQUEUE = """trap 'scontrol requeue "$SLURM_JOB_ID"; wait; exit 1' USR1"""
INTEL = ': "${I_MPI_PMI_LIBRARY:?must be the path of the libpmi2.so of Slurm, by which Intel MPI hears srun}"'
PMI: dict[Flavour, str] = {"openmpi": "pmix", "mpich": "pmi2", "intel": "pmi2"}


def srun(request: Request) -> list[str]:
    """The argv that starts the ranks inside an allocation; one rank's failure ends the step."""
    return [
        "srun",
        f"--mpi={PMI[request.flavour]}",
        f"--ntasks={request.ranks}",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        f"--cpus-per-task={request.cores_per_rank}",
        *program(request.program, "python"),
    ]


def script(request: Request) -> str:
    """The text for sbatch. Raises RequestError."""
    request = checked(request)
    options = {
        "job-name": request.name,
        "nodes": request.nodes,
        "ntasks": request.ranks,
        "ntasks-per-node": request.ranks_per_node,
        "cpus-per-task": request.cores_per_rank,
        "time": walltime(request.minutes),
        "output": "%x-%j.out",
        "partition": request.queue,
        "account": request.account,
        "gpus-per-node": request.gpus_per_node or None,
    }
    directives = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    if request.requeue:
        directives += ["#SBATCH --requeue", "#SBATCH --open-mode=append"]
        directives.append(f"#SBATCH --signal=B:USR1@{SECONDS_BEFORE_THE_LIMIT}")
    if request.restarts or request.options.spares >= 0:
        directives.append("#SBATCH --no-kill")
        slots = f"sed 's/$/ slots={request.ranks_per_node}/'"
        started = [f'scontrol show hostnames "$SLURM_JOB_NODELIST" | {slots} > {HOSTS}', mpips_run(request, HOSTS)]
    else:
        exports = sorted(request.options.environment().items())
        started = [INTEL] if request.flavour == "intel" else []
        started += [*(f"export {name}={shlex.quote(value)}" for name, value in exports), shlex.join(srun(request))]
    if request.requeue:
        started = [*started[:-1], REQUEUE, f"{started[-1]} &", "wait $!"]
    return text(directives, [threads(request), *started])
