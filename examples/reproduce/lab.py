"""Run a measuring program on every host of an emulated network, and get its answer back; see docs/reference/lab.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from collectives.simulator.topology import parse
from launch.lab import client
from launch.lab.kernel import find_missing
from launch.lab.layout import lay_out

# the emulated hosts share the cores
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ROOT = Path(__file__).resolve().parents[2]
# TCP payload of a full frame, and the size of the frame as the rate limiter counts it
MTU_PAYLOAD, MTU_FRAME = 8948, 9014
# bytes of a frame without payload; one is sent for every two full frames that arrive
ACKNOWLEDGEMENT = 66
# share of a link's rate that is left for payload when both directions are busy
EFFICIENCY = MTU_PAYLOAD / (MTU_FRAME + ACKNOWLEDGEMENT / 2)


@contextmanager
def networks(topologies: Mapping[str, str], rate: float) -> Iterator[dict[str, str]]:
    """Make labs for the block. Give key -> topology, and get key -> name of the lab.

    `rate` is that of every link, in bytes a second. SystemExit if labs cannot be made on this machine.
    """
    lacking = find_missing()
    if lacking:
        raise SystemExit("no lab can be made here:\n" + "\n".join(f"  - {line}" for line in lacking))
    with ExitStack() as labs:
        names = {}
        for key, topology in topologies.items():
            names[key] = labs.enter_context(
                client.lab(f"reproduce-{os.getpid()}-{key}", lay_out(parse(topology, rate)))
            )
        yield names


def ask(
    name: str,
    ranks: int,
    module: str,
    request: dict[str, Any],
    environment: Mapping[str, str] | None = None,
    limit: float = 200,
) -> Any:
    """Run ``python -m module REQUEST ANSWER`` on hosts of a lab, and return what rank 0 wrote as its answer.

    Args:
        name: The lab.
        ranks: Number of hosts. Each runs one rank.
        module: A measuring program, see `rank`.
        request: The request that the program reads.
        limit: Seconds after which the job is ended.

    Raises:
        SystemExit: If the job fails. The message has what it printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        question, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        question.write_text(json.dumps(request))
        program = [sys.executable, "-m", "mpips", "-m", module, str(question), str(answer)]
        argv = client.job_command(name, ranks, program)
        variables = {**os.environ, **ONE_THREAD, **(environment or {})}
        done = subprocess.run(argv, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=limit)
        if done.returncode or not answer.exists():
            raise SystemExit(f"{module} on {name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return json.loads(answer.read_text())
