"""Real labs of three or four hosts: separate nodes, true rates, true byte counts, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from collectives.machine import find_processes_with
from collectives.simulator.topology import parse
from launch import find
from launch.lab import client
from launch.lab.job import MARK_VARIABLE
from launch.lab.layout import lay_out
from tests.child import TOKEN
from tests.choice import first
from tests.lab.conftest import ROOT, Run
from tests.lab.support import SEND

pytestmark = pytest.mark.lab
Make = Callable[..., str]

WHO = """
from mpi4py import MPI
c = MPI.COMM_WORLD
node = c.Split_type(MPI.COMM_TYPE_SHARED)
all = c.gather((MPI.Get_processor_name(), node.size))
if c.rank == 0: print(all)
"""


def counters(name: str) -> dict[str, tuple[int, int]]:
    """(sent, received) bytes of every NIC, "h0 d0"."""
    hosts = client.ask(name, {"do": "status"})["hosts"]
    return {f"{h['name']} {n['name']}": (n["sent"], n["received"]) for h in hosts for n in h["nics"]}


def test_mpi_sees_a_node_in_every_host(make: Make, run: Run) -> None:
    name = make("star:3")
    done = run(name, 3, WHO)
    assert done.stdout.strip() == str([("h0", 1), ("h1", 1), ("h2", 1)]), done.stderr
    done = run(name, 5, WHO, per_host=2)
    assert done.stdout.strip() == str([("h0", 2), ("h0", 2), ("h1", 2), ("h1", 2), ("h2", 1)]), done.stderr


def test_bytes_are_counted_where_they_went_and_from_zero_after_a_reset(make: Make, run: Run) -> None:
    name = make("bcube:2,2")
    done = run(name, 4, SEND.format(source=0, target=3))
    assert done.returncode == 0, done.stderr
    moved = counters(name)
    size = 1 << 20
    # From 00 to 11: digit 1 first, to host 10 by level 1, which relays by level 0.
    for way in ("h0 d1", "h2 d0"):
        assert size < moved[way][0] < 1.03 * size
    for way in ("h2 d1", "h3 d0"):
        assert size < moved[way][1] < 1.03 * size
    assert max(moved[idle][0] for idle in ("h0 d0", "h1 d0", "h1 d1", "h3 d1")) < 0.03 * size
    client.ask(name, {"do": "reset"})
    assert set(counters(name).values()) == {(0, 0)}


def test_a_link_holds_its_rate(make: Make, run: Run) -> None:
    name = make("star:2", 1e6)
    code = SEND.format(source=0, target=1) + "import time; start = time.perf_counter()\n"
    code += SEND.format(source=0, target=1) + "if c.rank == 0: print(time.perf_counter() - start)\n"
    seconds = float(run(name, 2, code).stdout)
    assert seconds > 0.9 * (1 << 20) / 1e6  # a bound of physics, not of this machine's speed


def test_two_labs_stand_side_by_side(make: Make, run: Run) -> None:
    first, second = make("star:2"), make("star:3")
    assert {first, second} <= set(client.list_labs())
    assert run(first, 2, SEND.format(source=0, target=1)).returncode == 0
    assert counters(first)["h0 d0"][0] > 1 << 20
    assert set(counters(second).values()) == {(0, 0)}
    with pytest.raises(client.LabError, match=f"'{first}' is up already"):
        client.up(first, lay_out(parse("star:2")))


def test_unknown_labs_hosts_and_nics_are_named(make: Make) -> None:
    name = make("star:2")
    with pytest.raises(client.LabError, match=f"no lab named 'nowhere' is up.*{name}"):
        client.ask("nowhere", {"do": "status"})
    with pytest.raises(client.LabError, match="no NIC 'd1' on a host 'h0'"):
        client.ask(name, {"do": "link", "host": "h0", "nic": "d1", "up": False})
    with pytest.raises(ValueError, match="need 3 hosts, the lab has 2"):
        client.job_command(name, 3, ["true"])


# Nothing hangs


def test_a_rank_that_dies_ends_the_job(make: Make, run: Run) -> None:
    name = make("star:3")
    done = run(
        name, 3, "import os, signal\n" + WHO + "if c.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nc.Barrier()"
    )
    assert done.returncode != 0


DIE = """
import os, signal
here = os.readlink("/proc/self/ns/net")
for process in filter(str.isdigit, os.listdir("/proc")):
    if int(process) != os.getpid() and os.readlink(f"/proc/{process}/ns/net") == here:
        os.kill(int(process), signal.SIGKILL)
"""


def started(name: str, code: str, *options: str) -> subprocess.Popen[str]:
    """`mpips lab run` of a program on three hosts, once it has said "up"."""
    words = ["launch.lab", "run", "--name", name, "-n", "3", *options, "--", sys.executable, "-c", code]
    pipe = subprocess.PIPE
    job = subprocess.Popen([sys.executable, "-m", *words], cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert job.stdout is not None
    assert job.stdout.readline() == "up\n"
    return job


def test_a_store_works_under_lab_run(make: Make) -> None:
    name = make("star:3")
    code = "import mpips\nkv = mpips.create('dist_sync', servers=1)\n"
    job = started(name, code + "if kv.rank == 0: print('up', flush=True)\nkv.close()")
    said = job.communicate(timeout=60)[1]
    assert job.returncode == 0, said


DIE_ALONE = """
import os, signal
for process in filter(str.isdigit, os.listdir("/proc")):
    if open(f"/proc/{process}/comm").read().strip() == "lab-h1":
        os.kill(int(process), signal.SIGKILL)
"""


def test_a_host_whose_own_process_is_killed_ends_the_job_and_takes_no_other(make: Make, run: Run) -> None:
    name = make("star:3")
    job = started(name, BLOCKED, "--patience", "0")
    subprocess.run(client.host_command(name, "launcher", [sys.executable, "-c", DIE_ALONE]), check=True)
    said = job.communicate(timeout=60)[1]
    assert job.returncode == 1, said
    assert "host h1 died" in said
    for call in (
        lambda: client.job_command(name, 3, ["true"]),
        lambda: client.host_command(name, "h1", ["true"]),
        lambda: client.ask(name, {"do": "link", "host": "h1", "nic": "d0", "up": False}),
    ):
        with pytest.raises(client.LabError, match="host h1 died"):
            call()


def test_processes_that_a_job_left_on_a_host_are_ended(make: Make) -> None:
    name = make("star:2")
    argv = client.host_command(name, "h1", ["sh", "-c", "echo up; exec sleep 600"])
    left = subprocess.Popen(argv, env={**os.environ, MARK_VARIABLE: "a job"}, stdout=subprocess.PIPE, text=True)
    assert left.stdout is not None
    assert left.stdout.readline() == "up\n"
    assert client.ask(name, {"do": "clear", "job": "another"}) == {"killed": 0}
    assert client.ask(name, {"do": "clear", "job": "a job"})["killed"] > 0
    assert left.stdout.read() == ""
    assert left.wait(10) != 0


def test_a_host_all_of_whose_processes_are_killed_ends_the_job(make: Make, run: Run) -> None:
    name = make("star:3")
    code = "import time\nfrom mpi4py import MPI\nc = MPI.COMM_WORLD\nc.Barrier()\n"
    code += "if c.rank == 0: print('up', flush=True)\ntime.sleep(100)"
    job = started(name, code)
    subprocess.run(client.host_command(name, "h1", [sys.executable, "-c", DIE]), cwd=ROOT, check=False)  # it dies, too
    deadline = time.monotonic() + 10  # until the kernel has taken the last of them away
    while client.ask(name, {"do": "status"})["hosts"][1]["alive"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not client.ask(name, {"do": "status"})["hosts"][1]["alive"]
    said = job.communicate(timeout=90)[1]
    assert job.returncode != 0, said


LOSE = """
import subprocess
if c.rank == 1: subprocess.run(["ip", "link", "set", "d0", "down"], check=True)
"""


def is_down(name: str, host: str) -> bool:
    hosts = client.ask(name, {"do": "status"})["hosts"]
    return not next(h for h in hosts if h["name"] == host)["nics"][0]["up"]


def test_a_host_whose_nic_goes_down_ends_the_job(make: Make, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPS_TIMEOUT_SECONDS", "4")
    name = make("star:3")
    code = SEND.format(source=0, target=1) + "import collectives\nx = x.view(np.float32)\ncollectives.allreduce(x)\n"
    done = run(name, 3, code + LOSE + "for _ in range(100): collectives.allreduce(x)\n")
    assert done.returncode != 0
    assert "has waited for 4 s" in done.stderr + done.stdout
    assert is_down(name, "h1")


BLOCKED = """
import numpy as np
from mpi4py import MPI
c = MPI.COMM_WORLD
x = np.ones(1 << 18, np.uint8)
c.Allreduce(MPI.IN_PLACE, x)
if c.rank == 0: print("up", flush=True)
while True: c.Allreduce(MPI.IN_PLACE, x)
"""


@pytest.mark.parametrize("how", ["lab link", "ip link"])
def test_a_nic_that_goes_down_ends_a_job_that_is_in_a_blocking_call(make: Make, run: Run, how: str) -> None:
    name = make("star:3")
    job = started(name, BLOCKED, "--patience", "2")
    if how == "lab link":
        client.ask(name, {"do": "link", "host": "h1", "nic": "d0", "up": False})
    else:
        subprocess.run(client.host_command(name, "h1", ["ip", "link", "set", "d0", "down"]), check=True)
    said = job.communicate(timeout=90)[1]
    assert job.returncode == 1, said
    assert "NIC d0 of host h1 has been down" in said


@pytest.mark.full
def test_open_mpi_itself_gives_up_when_a_nic_goes_down(make: Make, run: Run) -> None:
    if find().flavour != "openmpi":
        pytest.skip("MPICH waits on for ever: with it `mpips lab run` ends the job, as in the test before")
    name = make("star:3")
    code = SEND.format(source=0, target=1) + LOSE + "for _ in range(100): c.Allreduce(MPI.IN_PLACE, x)\n"
    assert run(name, 3, code).returncode != 0
    assert is_down(name, "h1")
    found = client.ask(name, {"do": "health", "hosts": 3})
    assert found["down"] == [["h1", "d0"]]
    assert sum(found["given_up"].values()) > 0


def test_a_healthy_job_leaves_no_connection_given_up(make: Make, run: Run) -> None:
    name = make("bcube:2,2")
    assert run(name, 4, SEND.format(source=0, target=3)).returncode == 0
    found = client.ask(name, {"do": "health", "hosts": 4})
    assert found == {"down": [], "dead": [], "given_up": dict.fromkeys(("h0", "h1", "h2", "h3"), 0)}


def test_a_nic_that_comes_back_works_again(make: Make, run: Run) -> None:
    name = make("bcube:2,2")
    for nic, up in (("d0", False), ("d1", False), ("d0", True), ("d1", True)):
        client.ask(name, {"do": "link", "host": "h0", "nic": nic, "up": up})
    assert run(name, 4, SEND.format(source=0, target=3)).returncode == 0


def test_a_request_that_fails_is_an_error_and_the_lab_stays(make: Make) -> None:
    name = make("star:2")
    with pytest.raises(client.LabError, match=r"cannot do {.do.: .link.}: KeyError: 'host'"):
        client.ask(name, {"do": "link"})
    assert name in client.list_labs()
    assert len(client.ask(name, {"do": "status"})["hosts"]) == 2


# Nothing stays behind


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that these tests start carries a token, from the run or from here: others may have labs at the same time."""
    monkeypatch.setenv(TOKEN, os.environ.get(TOKEN) or uuid4().hex)


def present() -> set[str]:
    """This machine's links and mounts, and of what carries our token or process number the namespaces and labs."""
    labs = (name for name in client.list_labs() if str(os.getpid()) in name.split("-"))
    found = {*os.listdir("/sys/class/net"), *Path("/proc/self/mounts").read_text().splitlines(), *labs}
    for process in find_processes_with(f"{TOKEN}={os.environ[TOKEN]}"):
        for path in Path(f"/proc/{process}/ns").glob("*"):
            try:
                found.add(os.readlink(path))
            except OSError:
                continue  # the process has ended
    return found


def left_behind(before: set[str]) -> set[str]:
    """What is there now and was not before; the kernel has ten seconds to clear up."""
    for _ in range(100):
        if present() <= before:
            break
        time.sleep(0.1)
    return present() - before


@first(1, count=[6, 50])
def test_many_labs_leave_nothing(count: int) -> None:
    before = present()
    for number in range(count):
        with client.lab(f"test-many-{os.getpid()}", lay_out(parse("star:3" if number % 2 else "bcube:2,2"))) as name:
            assert number or len(present() - before) > 8  # what is left behind would be seen
            keeper = client.find_keeper(name)
        assert not Path(f"/proc/{keeper}/ns/net").exists()
    assert not left_behind(before)


@pytest.mark.parametrize("how", ["keeper killed", "maker killed", "down"])
def test_however_it_ends_nothing_is_left(how: str) -> None:
    before = present()
    name = f"test-end-{os.getpid()}"
    code = (
        "import sys, time; from launch.lab import client; from launch.lab.layout import lay_out\n"
        "from collectives.simulator.topology import parse\n"
        f"owner = client.up({name!r}, lay_out(parse('star:3')))\n"
        "print('up', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "up\n"
        keeper = client.find_keeper(name)
        sleeper = subprocess.Popen(client.host_command(name, "h1", ["sleep", "60"]))
        if how == "keeper killed":
            os.kill(keeper, signal.SIGKILL)
        elif how == "down":
            client.down(name)
        maker.kill()
    sleeper.wait(60)
    assert not left_behind(before)


def mpips(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "launch.lab", *words]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=180)


def test_the_command_from_up_to_down(tmp_path: Path) -> None:
    before = present()
    named = ("--name", f"test-command-{os.getpid()}")
    made = mpips("up", *named, "--rate", "200mbit", "star:2")
    assert made.returncode == 0, made.stderr
    try:
        assert mpips("exec", *named, "h1", "--", "hostname").stdout == "h1\n"
        assert mpips("reset", *named).returncode == 0
        assert mpips("status", *named, "--json", str(tmp_path / "s.json")).returncode == 0
        found = json.loads((tmp_path / "s.json").read_text())
        assert [nic["rate"] for host in found["hosts"] for nic in host["nics"]] == [200_000_000] * 2
        assert named[1] in mpips("list").stdout
    finally:
        done = mpips("down", *named)
    assert done.returncode == 0, done.stderr
    assert mpips("down", *named).returncode == 1
    assert not left_behind(before)


@pytest.mark.parametrize(
    "words, said", [(("up", "ring:3"), "unknown topology"), (("up", "star:2", "--rate", "9"), "mbit")]
)
def test_what_is_wrong_is_said(words: tuple[str, ...], said: str) -> None:
    done = mpips(*words)
    assert done.returncode == 2
    assert said in done.stderr
