"""Where a batch script for PBS (OpenPBS, PBS Pro) is written, for qsub. `mpips run` reads its $PBS_NODEFILE."""

from __future__ import annotations

from launch.batch.request import Request, checked, mpips_run, text, threads, walltime


def script(request: Request) -> str:
    """The text for `qsub SCRIPT`. Raises RequestError."""
    request = checked(request)
    chunk = f"ncpus={request.ranks_per_node * request.cores_per_rank}:mpiprocs={request.ranks_per_node}"
    if request.gpus_per_node:
        chunk += f":ngpus={request.gpus_per_node}"
    directives = [
        f"#PBS -N {request.name}",
        "#PBS -V",  # PBS starts jobs without the submitter's environment, in which mpips is found
        f"#PBS -l select={request.nodes}:{chunk}",
        "#PBS -l place=scatter",
        f"#PBS -l walltime={walltime(request.minutes)}",
        "#PBS -j oe",
        f"#PBS -r {'y' if request.requeue else 'n'}",
    ]
    if request.queue:
        directives.append(f"#PBS -q {request.queue}")
    if request.account:
        directives.append(f"#PBS -A {request.account}")
    body = ['cd "$PBS_O_WORKDIR"', threads(request), mpips_run(request, '"$PBS_NODEFILE"')]
    return text(directives, body)
