"""The network under a job: which NICs it needs, when it counts as broken, and what is said then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from collectives.simulator.topology import parse
from launch.lab import client
from launch.lab.client import TCP_SECONDS, NetworkWatch
from launch.lab.kernel import count_given_up, is_unplugged
from launch.lab.layout import find_crossed_nics, lay_out


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
