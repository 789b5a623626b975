"""What tests of labs share: a program that sends bytes from one rank to another, and `mpips` commands on hosts."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.lab import client

SEND = """
import numpy as np
from mpi4py import MPI
c = MPI.COMM_WORLD
x = np.ones(1 << 20, np.uint8)
if c.rank == {source}: c.Send(x, {target})
if c.rank == {target}: c.Recv(x, {source})
c.Barrier()
"""


def command(lab: str, host: str, *words: str, folder: Path) -> list[str]:
    """Return the argv of an `mpips` command on one host, or the launcher, of a lab, in a folder."""
    started = ["env", "-C", str(folder), f"PYTHONPATH={Path(__file__).resolve().parents[2]}", sys.executable]
    return client.host_command(lab, host, [*started, "-m", "launch.cli", *words])
