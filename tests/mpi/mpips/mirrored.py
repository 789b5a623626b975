"""A job with mirrors whose nodes are lost. Where each rank is a node of its own nobody maps a dead server's memory.

mpips run --spares N ... -m tests.mpi.mpips.mirrored FOLDER JOB, as `survivor`. A negative time -n: a server dies while
the n-th unit goes to its mirror.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mpips
from mpips.store.recovery.mirror import Mirror
from tests.mpi.deaths import die
from tests.mpi.mpips import survivor
from tests.mpi.mpips.survivor import train


@dataclass
class Job(survivor.Job):
    mirrors: int = 1
    servers: int = 2
    steps: int = 60
    apart: bool = True

    def options(self) -> dict[str, Any]:
        """Of the store."""
        own = {"servers": self.servers, "spares": self.spares, "masters": self.masters, "mirrors": self.mirrors}
        return {"shared_memory": not self.apart, "big_array": 1000, "timeout_seconds": 30, **own}


def die_sending(count: int) -> None:
    """With the unit of that number."""
    send, sent = Mirror._send, []

    def sends(self: Mirror, unit: Any) -> None:
        send(self, unit)
        sent.append(unit)
        if len(sent) == count:
            die()

    Mirror._send = sends


def main(folder: Path, job: Job) -> None:
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    if (when := job.kills.get(rank, 0)) < 0:
        die_sending(-int(when))
    else:
        job.die_in_time(folder, rank)
    kv = mpips.create(job.kind, **job.options())
    (folder / "begun").touch()
    values, trace = train(kv, job, folder)
    if kv.rank == 0:
        np.savez(folder / "values.npz", **values)
    (folder / f"{rank}.trace").write_text(json.dumps(trace))
    kv.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Job(**json.loads(sys.argv[2])))
