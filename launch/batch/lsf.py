"""Where a batch script for LSF is written, for bsub. `mpips run` reads its $LSB_DJOB_HOSTFILE, a line a slot."""

from __future__ import annotations

from launch.batch.request import Request, checked, mpips_run, text, threads


def script(request: Request) -> str:
    """The text for `bsub < SCRIPT`. Raises RequestError."""
    request = checked(request)
    wanted = f"span[ptile={request.ranks_per_node}]"
    if request.cores_per_rank > 1:  # hosts that are not set up for affinity never get a job that asks for it
        wanted += f" affinity[core({request.cores_per_rank})]"
    directives = [
        f"#BSUB -J {request.name}",
        f"#BSUB -n {request.ranks}",
        f'#BSUB -R "{wanted}"',
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
    return text(directives, [threads(request), mpips_run(request, '"$LSB_DJOB_HOSTFILE"')])
