"""`mpips run --topology` on a lab: the hosts' own words decide their order, and NICs that do not fit are refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch import LauncherError, find
from launch.lab import client
from launch.lab.job import open_mpi_options

WHO = """
import os, socket
from mpi4py import MPI
os.write(1, f"rank {MPI.COMM_WORLD.rank} on {socket.gethostname()}\\n".encode())
"""


@pytest.fixture
def run(make: Callable[..., str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`mpips run --topology bcube:2,2` from the launcher of a lab, with the hosts out of order."""
    try:
        if find().flavour != "openmpi":
            pytest.skip("starts Open MPI's daemons by the lab's agent")
    except LauncherError as error:
        pytest.skip(str(error))
    lab = make("bcube:2,2")
    hosts, script = tmp_path / "hosts", tmp_path / "who.py"
    hosts.write_text("h3\nh0\nh2\nh1\n")
    script.write_text(WHO)

    def started(nics: str) -> subprocess.CompletedProcess[str]:
        agent = [f"--mpi-arg={word}" for word in open_mpi_options()]
        words = ["--topology", "bcube:2,2", "--nics", nics, "--interface", "vip0", "--hostfile", str(hosts), "-w", "4"]
        command = [sys.executable, "-m", "launch.run", *words, *agent, str(script)]
        argv = client.host_command(lab, "launcher", command)
        return subprocess.run(argv, capture_output=True, text=True, timeout=180, check=False)

    return started


def test_ranks_follow_addresses(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run("d0,d1")
    assert done.returncode == 0, done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    # h3 comes first in the file: it gets address (0, 0), and its neighbours h2 (level 0) and h1 (level 1) follow.
    assert lines == ["rank 0 on h3", "rank 1 on h2", "rank 2 on h1", "rank 3 on h0"]


def test_a_nic_of_another_network(run: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run("d1,m0")
    assert done.returncode != 0
    assert "of level 1 holds 4 hosts" in done.stderr
    assert "Traceback" not in done.stderr
