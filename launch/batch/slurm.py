"""Where a batch script for Slurm is written, for sbatch, and the srun line in it.

Open MPI's processes find each other by PMIx (`--mpi=pmix`), those of MPICH and Intel MPI by PMI-2 (`--mpi=pmi2`); with
the wrong one each starts as a world of size 1 or aborts. Ranks fill the nodes in order, so the servers, numbered last,
are on the last nodes.
"""

from __future__ import annotations

import shlex

from launch.batch.request import Request, checked, text, threads, walltime
from launch.mpirun import Flavour, program

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
    roles = [f"export {name}={value}" for name, value in sorted(request.options.environment().items())]
    needs = [INTEL] if request.flavour == "intel" else []
    return text(directives, [*needs, *roles, threads(request), shlex.join(srun(request))])
