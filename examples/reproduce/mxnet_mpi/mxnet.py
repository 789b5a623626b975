"""Runs MXNet's own dist_sync on the hosts of a lab: workers on the first hosts, then servers and the scheduler."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from examples.reproduce import lab
from launch.lab import client

WORKER = lab.ROOT / "examples" / "reproduce" / "store" / "mxnet_worker.py"
PORT = 9091


def synchronised(name: str, python: str, workers: int, servers: int, nbytes: int, repeats: int) -> dict[str, Any]:
    """Run an MXNet job on the lab `name`, and time push + pull of one key of `nbytes` bytes, `repeats` times.

    Args:
        python: A Python that has mxnet 1.9.1.

    Returns:
        {"seconds": those of each repeat on worker 0, "idle": the share of the cores that was idle meanwhile}.

    Raises:
        SystemExit: If the job fails or takes longer than 120 s. The message has what its workers printed.
    """
    hosts = client.ask(name, {"do": "status"})["hosts"]
    common = {
        "DMLC_PS_ROOT_URI": hosts[workers]["vip"],
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NUM_WORKER": str(workers),
        **lab.ONE_THREAD,
    }
    roles = [("scheduler", workers)] + [("server", workers + i) for i in range(servers)]
    roles += [("worker", i) for i in range(workers)]
    processes = []
    for role, place in roles:
        variables = {**os.environ, **common, "DMLC_ROLE": role, "DMLC_NODE_HOST": hosts[place]["vip"]}
        argv = client.host_command(name, hosts[place]["name"], [python, str(WORKER), str(nbytes), str(repeats)])
        processes.append(
            subprocess.Popen(argv, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [process.communicate(timeout=120) for process in processes[-workers:]]
    except subprocess.TimeoutExpired:
        raise SystemExit("the MXNet job is not done after 120 s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [line for out, _ in said for line in out.splitlines() if line.startswith("[")]
    if not lines:
        raise SystemExit("the MXNet job gave no times:\n" + "\n".join(error[-400:] for _, error in said))
    return dict(json.loads(lines[0])[0])
