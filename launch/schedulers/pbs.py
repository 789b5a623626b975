"""PBS (OpenPBS, PBS Pro): a script for qsub. PBS writes a line a rank into $PBS_NODEFILE, which `mpips run` reads."""

from __future__ import annotations

from launch.schedulers.request import Request, checked, mpips_run, text, threads, walltime


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
    ]
    if request.queue:
        directives.append(f"#PBS -q {request.queue}")
    if request.account:
        directives.append(f"#PBS -A {request.account}")
    body = ['cd "$PBS_O_WORKDIR"', threads(request), mpips_run(request, '"$PBS_NODEFILE"')]
    return text(directives, body)
