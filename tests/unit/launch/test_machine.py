"""How many ranks a machine can hold: which ranks count, and what is said of those that do not fit."""

from __future__ import annotations

import socket

import pytest

from launch import Job, LauncherError, Machine
from launch.hosts import Placed
from launch.machine import Capacity, check_room, choose_loopback, choose_threads, measure_room, warn_of_crowd
from launch.mpirun import Flavour, Launcher

SMALL = Capacity(8, "it is small")


def test_ranks_may_outnumber_cores_but_not_what_fits() -> None:
    check_room(Job(8, ()), {}, SMALL)
    with pytest.raises(LauncherError, match="9 ranks cannot start on this machine: it is small; ask for at most 8"):
        check_room(Job(9, ()), {}, SMALL)


def test_only_ranks_of_this_machine_count() -> None:
    check_room(Job(9, (), hosts=(Placed("far", 9),)), {}, SMALL)
    here = (Placed("far", 9), Placed("localhost", 5), Placed(socket.gethostname(), 4))
    with pytest.raises(LauncherError, match="9 ranks cannot"):
        check_room(Job(18, (), hosts=here), {}, SMALL)


@pytest.mark.parametrize("extra, variables", [
    (("--hostfile", "f"), {}),
    (("-hosts", "a,b"), {}),
    ((), {"LSB_JOBID": "1"}),
])  # fmt: skip
def test_where_mpirun_finds_hosts_by_itself_nothing_is_known(
    extra: tuple[str, ...], variables: dict[str, str]
) -> None:
    check_room(Job(9, (), extra=extra), variables, SMALL)


def test_this_machine_holds_some_and_not_any_number() -> None:
    found = measure_room()
    assert 1 < found.ranks < 10**9
    assert found.why


def test_many_ranks_a_core_are_warned_of_with_what_to_do() -> None:
    assert warn_of_crowd(Job(32, ()), Machine(2), {}) is None
    said = warn_of_crowd(Job(1000, ()), Machine(2), {})
    assert said is not None
    assert "1000 ranks share 2 cores: starting them takes some 300 s" in said
    assert "ask for fewer" in said
    assert warn_of_crowd(Job(1000, (), hosts=(Placed("far", 1000),)), Machine(2), {}) is None


def test_threads_share_the_cores_unless_the_user_says() -> None:
    assert choose_threads(3, Machine(8), {}) == {"OMP_NUM_THREADS": "2"}
    assert choose_threads(9, Machine(8), {}) == {"OMP_NUM_THREADS": "1"}
    assert choose_threads(3, Machine(8), {"MKL_NUM_THREADS": "4"}) == {"MKL_NUM_THREADS": "4"}


@pytest.mark.parametrize(
    ("flavour", "settings"),
    [
        ("openmpi", {"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"}),
        ("mpich", {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}),
        ("intel", {"FI_TCP_IFACE": "lo"}),
    ],
)
def test_ranks_of_one_machine_are_not_reached_from_others(flavour: Flavour, settings: dict[str, str]) -> None:
    launcher, job = Launcher("mpirun", flavour, "1"), Job(2, ("x",))
    assert choose_loopback(job, launcher, {}) == settings
    for name in settings:  # the user's own count
        assert choose_loopback(job, launcher, {name: "eth0"}) == {}
        extra = ("--mca", name.removeprefix("OMPI_MCA_"), "eth0")
        assert choose_loopback(job._replace(extra=extra), launcher, {}) == {}
    assert choose_loopback(job._replace(hosts=(Placed("node1", 2),)), launcher, {}) == {}
    assert choose_loopback(job._replace(interface="eth0"), launcher, {}) == {}
    assert choose_loopback(job, launcher, {"LSB_JOBID": "1"}) == {}  # mpirun may know of other hosts
    assert choose_loopback(job._replace(extra=("--hostfile", "hosts")), launcher, {}) == {}
