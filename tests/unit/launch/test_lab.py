"""Labs, as far as no namespace is made: plans, jobs, agents, the watch over a network, and folders of labs.

In a plan, walked as frames would go, every host reaches every other by the links the topology names.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.simulator.topology import Topology, hop_links, parse, parse_rate
from launch import Launcher
from launch.lab import client, job
from launch.lab.client import TCP_SECONDS, NetworkWatch
from launch.lab.job import AGENT, format_agent, format_hosts
from launch.lab.kernel import count_given_up, is_unplugged
from launch.lab.layout import LabHost, LabPlan, choose_window, find_crossed_nics, lay_out
from tests.strangers import STRANGER, needs_root, stranger

NAMES = ["star:1", "star:2", "star:9", "bcube:3,2", "bcube:2,3", "bcube:4,1", "fattree:2", "fattree:4"]


@pytest.fixture(params=NAMES)
def topology(request: pytest.FixtureRequest) -> Topology:
    return parse(request.param, 12.5e6)


def ports(plan: LabPlan) -> dict[str, tuple[str, str]]:
    """What is at the other end of each switch port: (host, NIC) or (switch, "")."""
    ends = {nic.port: (host.name, nic.name) for host in plan.hosts for nic in host.nics}
    for trunk in plan.trunks:
        ends[trunk.first_port] = (trunk.second, "")
        ends[trunk.second_port] = (trunk.first, "")
    return ends


def walk(plan: LabPlan, source: LabHost, target: LabHost) -> list[tuple[str, str]]:
    """The (from, to) of every cable that a packet crosses, as the plan's routes and tables lead it."""
    hosts = {host.name: host for host in plan.hosts}
    ends, table = ports(plan), {(switch, mac): port for switch, port, mac in plan.forwards}
    at, crossed = source, []
    while at is not target:
        route = next(route for route in at.routes if route.vip == target.vip)
        mac = route.mac
        place = next(nic.switch for nic in at.nics if nic.name == route.nic)
        crossed.append((at.name, place))
        while place not in hosts:
            before, (place, nic) = place, ends[table[place, mac]]
            crossed.append((before, place))
            assert len(crossed) < 100, "a loop"
        at = hosts[place]
        arrived = next(n for n in at.nics if n.name == nic)
        assert (arrived.mac, arrived.address) == (mac, route.gateway)
    return crossed


def test_packets_take_the_links_of_the_topology(topology: Topology) -> None:
    plan = lay_out(topology)
    for i, source in enumerate(plan.hosts):
        for j, target in enumerate(plan.hosts):
            links = [topology.links[number] for number in hop_links(topology, i, j)]
            assert walk(plan, source, target) == [(link.source, link.target) for link in links]


def test_every_nic_and_trunk_of_the_topology_is_there_at_its_rate(topology: Topology) -> None:
    plan = lay_out(topology)
    assert len(plan.hosts) == topology.hosts
    assert set(plan.switches) == set(topology.switches)
    assert [(n.level, n.switch) for h in plan.hosts for n in h.nics] == [
        (nic.level, topology.switches[nic.switch]) for nic in topology.nics
    ]
    assert {n.rate for h in plan.hosts for n in h.nics} | {t.rate for t in plan.trunks} == {100_000_000}
    assert 2 * (len(plan.trunks) + len(topology.nics)) == len(topology.links)


@pytest.mark.parametrize(("rate", "expected"), [(1e6, 128 * 1024), (25e6, 250_000), (1e9, 512 * 1024)])
def test_connections_have_under_way_what_a_link_carries_in_ten_milliseconds(rate: float, expected: int) -> None:
    assert choose_window(lay_out(parse("star:2", rate))) == expected


def test_addresses_and_names_are_unique_and_legal(topology: Topology) -> None:
    plan = lay_out(topology)
    nics = [nic for host in plan.hosts for nic in host.nics]
    addresses = [nic.address for nic in nics] + [a for host in plan.hosts for a in (host.vip, host.management)]
    assert len(set(addresses)) == len(addresses)
    assert len({nic.mac for nic in nics}) == len(nics)
    names = [*ports(plan), *plan.switches, *(f"{host.name}m0" for host in plan.hosts)]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= 15  # the kernel's limit
    assert not any("_" in host.name for host in plan.hosts)  # host names may not hold it


def test_hosts_on_one_switch_share_a_subnet_and_a_hosts_nics_do_not(topology: Topology) -> None:
    plan = lay_out(topology)
    subnets: dict[str, set[str]] = {}
    for host in plan.hosts:
        own = [nic.address.rsplit(".", 1)[0] for nic in host.nics]
        assert len(set(own)) == len(own)
        for nic, subnet in zip(host.nics, own):
            subnets.setdefault(nic.switch, set()).add(subnet)
    assert all(len(found) == 1 for found in subnets.values())


@pytest.mark.parametrize(
    "name, rate, what",
    [
        ("star:251", 1e6, "251 hosts"),
        ("bcube:2,7", 1e6, "448 switches"),
        ("star:2", 5e9, "40 Gbit/s"),
    ],
)
def test_what_is_too_large_is_refused_with_its_size(name: str, rate: float, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        lay_out(parse(name, rate))


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
    assert job.choose_variables(OPEN_MPI, {}) == job.choose_variables(MPICH, chosen) == {}
    argv = job.build_job(MPICH, HOSTS, 3, ["x"], environment=job.choose_variables(MPICH, {}))
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


@pytest.mark.parametrize(
    "topology, hosts, needed",
    [
        ("star:3", 1, []),
        ("star:3", 2, ["h0 d0", "h1 d0"]),
        ("fattree:2", 2, ["h0 d0", "h1 d0"]),
        ("bcube:3,2", 3, ["h0 d0", "h1 d0", "h2 d0"]),  # one switch of level 0: no other level, no other host
        ("bcube:2,2", 3, ["h0 d0", "h0 d1", "h1 d0", "h1 d1", "h2 d0", "h2 d1", "h3 d0", "h3 d1"]),  # h3 relays
    ],
)
def test_a_job_needs_the_nics_its_traffic_crosses(topology: str, hosts: int, needed: list[str]) -> None:
    found = find_crossed_nics(lay_out(parse(topology)), hosts)
    assert [f"{host} {nic.name}" for host, nic in found] == needed


def test_a_port_passes_frames_while_it_has_a_carrier(tmp_path: Path) -> None:
    for port, carrier in (("up", "1\n"), ("down", "0\n")):
        (tmp_path / port).mkdir()
        (tmp_path / port / "carrier").write_text(carrier)
    assert [is_unplugged(port, tmp_path) for port in ("up", "down", "gone")] == [False, True, True]


def test_connections_given_up_are_the_kernels_count(tmp_path: Path) -> None:
    (tmp_path / "7" / "net").mkdir(parents=True)
    text = "TcpExt: A TCPAbortOnTimeout B\nTcpExt: 1 5 9\nIpExt: TCPAbortOnTimeout\nIpExt: 3\n"
    (tmp_path / "7" / "net" / "netstat").write_text(text)
    assert count_given_up(7, tmp_path) == 5
    assert count_given_up(8, tmp_path) == 0


class Network:
    """A keeper's answers, and a clock, as a test sets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.down: list[list[str]] = []
        self.dead: list[str] = []
        self.given_up = {"h0": 2, "h1": 0}
        self.seconds = 100.0
        monkeypatch.setattr(client, "ask", self.ask)

    def ask(self, name: str, request: dict[str, Any]) -> dict[str, Any]:
        assert (name, request) == ("x", {"do": "health", "hosts": 2})
        return {"down": list(self.down), "dead": list(self.dead), "given_up": dict(self.given_up)}

    def after(self, watch: NetworkWatch, seconds: float) -> bool:
        self.seconds += seconds
        return watch()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch)


@pytest.fixture
def watch(network: Network) -> NetworkWatch:
    return NetworkWatch("x", 2, 20.0, clock=lambda: network.seconds)


def test_a_nic_that_stays_down_ends_the_job(network: Network, watch: NetworkWatch) -> None:
    assert not network.after(watch, 1)
    network.down = [["h1", "d0"]]
    assert not network.after(watch, 1)
    assert not network.after(watch, 19)
    assert network.after(watch, 1)
    assert "NIC d0 of host h1 has been down for 20 s" in watch.reason
    assert "`mpips lab link --name x h1 d0 up`" in watch.reason


def test_a_nic_that_comes_back_starts_anew(network: Network, watch: NetworkWatch) -> None:
    for _ in range(3):
        network.down = [["h1", "d0"]]
        assert not network.after(watch, 1)
        assert not network.after(watch, 15)
        network.down = []
        assert not network.after(watch, 1)
    assert watch.reason == ""


def test_a_connection_lost_during_the_job_ends_it_though_the_nic_is_back(network: Network, watch: NetworkWatch) -> None:
    assert not network.after(watch, 1)  # what was lost before the job began is another job's
    network.given_up["h1"] = 1
    assert not network.after(watch, 1)
    assert not network.after(watch, 20 - TCP_SECONDS - 1)
    assert network.after(watch, 1)
    assert "TCP on host h1" in watch.reason


def test_a_host_that_died_ends_the_job_at_once(network: Network, watch: NetworkWatch) -> None:
    assert not network.after(watch, 1)
    network.dead = ["h1"]
    assert network.after(watch, 1)
    assert "host h1 died" in watch.reason
    assert "`mpips lab down --name x`" in watch.reason


def test_a_lab_that_has_gone_is_no_reason(
    network: Network, watch: NetworkWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(name: str, request: dict[str, Any]) -> dict[str, Any]:
        raise client.LabError("there is none")

    monkeypatch.setattr(client, "ask", gone)
    assert not network.after(watch, 100)
    assert watch.reason == ""


ROOT = Path(__file__).resolve().parents[3]
PRETENDER = r"""
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind("\0mpips-lab-0-pretended")
    listener.listen()
    print("listens", flush=True)
    while True:
        line, _ = listener.accept()
        with line:
            if line.makefile().readline():
                line.sendall(b'{"hosts": ["h0"], "dead": [], "topology": "star:1"}\n')
"""


@needs_root
def test_a_socket_of_another_user_is_no_lab() -> None:
    process = stranger(PRETENDER)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        assert "pretended" not in client.list_labs()
        with pytest.raises(client.LabError, match="no lab named 'pretended' is up"):
            client.host_command("pretended", "launcher", ["id"])
        with pytest.raises(client.LabError, match="no lab named 'pretended' is up"):
            client.job_command("pretended", 1, ["id"])
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(
    ("planted", "words", "said"),
    [
        (f"mkdir -m 700 /run/mpips && chown {STRANGER} /run/mpips", "exec launcher -- id", f"to user {STRANGER}, and"),
        ("mkdir -m 777 /run/mpips && chmod 777 /run/mpips", "list", "other users can open"),
        (
            "mkdir -m 700 /run/other && ln -s /run/other /run/mpips",
            "down --all",
            "cannot be made or opened: Not a directory",
        ),
    ],
)
def test_a_folder_that_another_user_may_be_behind_is_refused(planted: str, words: str, said: str) -> None:
    own_run = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none /run && {planted} && exec "$@"', "sh"]
    if subprocess.run([*own_run[:4], "mount -t tmpfs none /run"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    command = [*own_run, sys.executable, "-m", "launch.lab", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: ")
    assert said in done.stderr


BUSY = """
import socket, sys, time
from launch.lab.keeper import ending_with
with ending_with(socket.socket(fileno=int(sys.argv[1]))):
    print("busy", flush=True)
    while True:
        time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_a_lab_that_is_being_made_ends_when_its_maker_does(before: bool) -> None:
    pytest.importorskip("pyroute2")
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-c", BUSY, str(theirs.fileno())]
    with theirs, ours, subprocess.Popen(words, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True) as keeper:
        theirs.close()
        assert keeper.stdout is not None
        if not before:
            assert keeper.stdout.readline() == "busy\n"
        ours.close()
        try:
            assert keeper.wait(60) == 1
        finally:
            keeper.kill()


SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_jobs_processes_end_and_no_others():
    mine = uuid.uuid4().hex
    own = subprocess.Popen(SLEEP, env={**os.environ, job.MARK_VARIABLE: mine}, start_new_session=True)
    others = [
        subprocess.Popen(SLEEP, env={**os.environ, job.MARK_VARIABLE: mine + "0"}),
        subprocess.Popen(SLEEP),
    ]
    try:
        assert job.end_all(mine) == 1
        assert own.wait(10) == -signal.SIGKILL
        assert [other.poll() for other in others] == [None, None]
        assert job.end_all(mine) == 0
    finally:
        for process in (own, *others):
            process.kill()
            process.wait()
