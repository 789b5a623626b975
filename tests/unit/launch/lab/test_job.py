"""The command that starts a job in a lab, and the agent that takes it to a host. No namespace is made."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.simulator.topology import parse, parse_rate
from launch import Launcher
from launch.lab import job
from launch.lab.job import AGENT, format_agent, format_hosts
from launch.lab.layout import lay_out

HOSTS = ["h0", "h1", "h2"]
OPEN_MPI, MPICH = Launcher("mpirun", "openmpi", "5.0.11"), Launcher("mpiexec", "mpich", "5.0.2")


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 40))
def test_ranks_fill_the_hosts_in_order(ranks: int, per_host: int, hosts: int) -> None:
    names = [f"h{i}" for i in range(hosts)]
    if ranks > hosts * per_host:
        with pytest.raises(ValueError, match=f"the lab has {hosts}"):
            job.place_on_hosts(names, ranks, per_host)
        return
    placed = job.place_on_hosts(names, ranks, per_host)
    assert sum(block.ranks for block in placed) == ranks
    assert [block.host for block in placed] == names[: len(placed)]
    assert all(block.ranks == per_host for block in placed[:-1])
    assert 1 <= placed[-1].ranks <= per_host


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH], ids=["openmpi", "mpich"])
def test_data_goes_by_the_vips_and_the_launcher_by_management(launcher: Launcher) -> None:
    argv = job.build_job(launcher, HOSTS, 3, ["python", "x.py"])
    line = " ".join(argv)
    assert AGENT in argv
    assert "vip0" in line
    assert argv[-2:] == ["python", "x.py"]
    if launcher.flavour == "openmpi":
        assert "--mca btl_tcp_if_include vip0" in line
        assert "--prtemca prte_if_include 10.255.0.0/16" in line
        assert "--mca mpi_yield_when_idle 1" in line
    else:
        assert "-genv FI_TCP_IFACE vip0" in line
        assert "-iface m0" in line


def test_with_mpich_waits_end_unless_the_caller_says_otherwise() -> None:
    chosen = {job.TIMEOUT: "5"}
    assert job.defaults(OPEN_MPI, {}) == job.defaults(MPICH, chosen) == {}
    argv = job.build_job(MPICH, HOSTS, 3, ["x"], environment=job.defaults(MPICH, {}))
    assert f"-genv {job.TIMEOUT} 60" in " ".join(argv)


def test_hosts_share_the_cores_of_the_machine() -> None:
    few = job.build_job(OPEN_MPI, HOSTS, 3, ["x"], cores=2)
    many = job.build_job(OPEN_MPI, HOSTS, 3, ["x"], cores=64)
    assert "--oversubscribe" in few
    assert "--oversubscribe" not in many


@pytest.mark.parametrize("user, own", [(0, False), (1000, True)])
def test_an_ordinary_users_lab_is_entered_through_its_user_namespace(user: int, own: bool) -> None:
    argv = job.build_entry(17, ["mpirun", "x y"], folder="/some where", user=user)
    assert ("--user" in argv) == own
    assert argv[argv.index("--target") + 1] == "17"
    assert argv[-2:] == ["mpirun", "x y"]


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """The agent of a lab, with an `nsenter` that tells which process it was given and runs the command here."""
    plan = lay_out(parse("star:3"))
    (tmp_path / "agent").write_text(format_agent(plan, [101, 102, 103]))
    (tmp_path / "nsenter").write_text('#!/bin/sh\necho "process $2"\nshift 5\nexec "$@"\n')
    for name in ("agent", "nsenter"):
        (tmp_path / name).chmod(0o755)
    return tmp_path


def call(agent: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{agent}:{os.environ['PATH']}"}
    return subprocess.run([agent / "agent", *words], cwd=agent, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("words", [("h1",), ("-x", "h1"), ("-l", "root", "-p", "22", "h1"), ("10.255.0.2",)])
def test_the_agent_is_called_as_ssh_is(agent: Path, words: tuple[str, ...]) -> None:
    done = call(agent, *words, "A='x  y';", 'echo "$A"; pwd')
    assert done.stdout.splitlines() == ["process 102", "x  y", str(agent)]


def test_the_agent_returns_the_exit_code_and_names_an_unknown_host(agent: Path) -> None:
    assert call(agent, "h0", "exit 7").returncode == 7
    unknown = call(agent, "h9", "true")
    assert unknown.returncode == 1
    assert "h9" in unknown.stderr


def test_hosts_file_names_every_host_and_the_launcher() -> None:
    lines = format_hosts(lay_out(parse("bcube:2,2"))).splitlines()
    assert [line.split()[1] for line in lines] == ["localhost", "launcher", "h0", "h1", "h2", "h3"]


@pytest.mark.parametrize("text, expected", [("100mbit", 12.5e6), ("1.5Gbit", 187.5e6), (" 800kbit ", 1e5)])
def test_rates_are_written_with_their_unit(text: str, expected: float) -> None:
    assert parse_rate(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["100", "fast", "0mbit", "-1mbit", "1tbit", ""])
def test_a_rate_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write a number and kbit, mbit or gbit"):
        parse_rate(text)
