"""Servers and workers are killed, at any moment, and tables hold the rows of a serial dictionary, bit for bit."""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path

import pytest

from tests import child
from tests.choice import first
from tests.mpi.mpips import table_survivor
from tests.mpi.mpips.killed import HINDRANCE, ROOT, run
from tests.mpi.mpips.survivor import Job
from tests.mpi.sizes import JOB_LIMIT

pytestmark = pytest.mark.skipif(bool(HINDRANCE), reason=HINDRANCE)
STEPS = 300
SAVES = """
import sys
import numpy as np
import mpips

kv = mpips.create("dist_sync", mirrors=1, shared_memory=False)
folder, ids, ones = sys.argv[1], np.arange(1000), np.ones((1000, 3), np.float32)
table = kv.table("t", 3, init=mpips.uniform(0.5), optimizer="adam", learning_rate=0.1, admit=mpips.seen(2))
for _ in range(3):
    table.push(ids, ones)
table.update_optimizer(learning_rate=0.2)
saved, since = table.pull(ids), table.export(folder + "/export")
table.save(folder + "/table")
kv.save(folder + "/store")
after = table.pushpull(ids, ones)
for load in (lambda: table.load(folder + "/table"), lambda: kv.load(folder + "/store")):
    load()
    assert (table.pull(ids) == saved).all() and table.rows == 1000
    assert (table.pushpull(ids, ones) == after).all()
refused = table.stats()["refused"]
kv.barrier()
rounds = kv.recover()
assert (table.pull(ids) == after).all() and not rounds.torn and table.stats()["refused"] == refused == 1000
print("all is there", flush=True)
kv.close()
"""

OVERFLOWS = """
import numpy as np
import mpips

kv = mpips.create("dist_sync", check_finite=True)
table = kv.table("t", 2, "float16", learning_rate=1.0, admit=mpips.seen(1))
ids, gradient = np.arange(1000), np.full((1000, 2), -1, np.float16)
gradient[999] = -4e4 * (kv.rank == 0)
saved = table.pushpull(ids[:500], gradient[:500])
table.update_optimizer(learning_rate=4.0)
try:
    table.pushpull(ids[400:], gradient[400:])
except mpips.StoreError as error:
    assert "update 2 failed: a value of the row of id 999 is inf in float16" in str(error), error
rounds = kv.recover()
assert (rounds["t"], table.pushes, table.rows) == (1, 1, 500) and not rounds.torn, rounds
assert (table.pull(ids[:500]) == saved).all()
print("all is there", flush=True)
kv.close()
"""


def survive(folder: Path, job: Job, ranks: int) -> list[list[list[int]]]:
    return run(folder, job, ranks, "tests.mpi.mpips.table_survivor", table_survivor.expected)


@pytest.mark.core(1)
@pytest.mark.parametrize("victim, servers, spares", [(3, 2, 1), (1, 2, 1), (3, 2, 0), (1, 1, 0)])
def test_rows_outlive_a_server_and_a_worker(tmp_path: Path, victim: int, servers: int, spares: int) -> None:
    job = Job("dist_sync", servers, spares=spares, steps=STEPS, kills={str(victim): 0.2})
    assert len(survive(tmp_path, job, 2 + servers + spares)) == 2 - (victim == 1 and not spares)


@pytest.mark.slow
@first(
    2,
    **{
        "victims, servers, spares, hosts": [
            ([2], 2, 1, [0, 0, 0, 1, 1]),  # a spare on another host takes its place
            ([3], 3, 0, [0, 0, 0, 1, 1]),  # servers on two hosts become fewer
            ([2, 4], 3, 1, [0, 0, 0, 1, 1, 0]),
            ([2], 2, 0, [0, 0, 0, 1]),
            ([3], 2, 1, [0, 1, 0, 1, 0]),
        ]
    },
)
def test_rows_travel_between_hosts(
    tmp_path: Path, victims: list[int], servers: int, spares: int, hosts: list[int]
) -> None:
    kills = {str(victim): 0.2 + 0.3 * number for number, victim in enumerate(victims)}
    job = Job("dist_sync", servers, spares=spares, steps=STEPS, kills=kills, hosts=tuple(hosts))
    assert len(survive(tmp_path, job, 2 + servers + spares)) == 2


@pytest.mark.slow
def test_rows_are_lost_with_all_that_reach_them(tmp_path: Path) -> None:
    job = Job("dist_sync", 2, spares=1, steps=STEPS, kills={"2": 0.1}, clocks=(0,), hosts=(0, 0, 1, 2, 2))
    with pytest.raises(AssertionError, match=r"nobody has all parts of .*'users'.* checkpoint"):
        survive(tmp_path, job, 5)


@pytest.mark.slow
@first(
    2,
    **{
        "kind, victims, servers, spares, hosts": [
            ("dist_sync", [2], 2, 1, [0, 0, 1, 2, 2]),  # a host of its own is lost, a spare takes its place
            ("dist_sync", [3, 1], 3, 0, [0, 1, 0, 1, 2]),  # a server and a worker are lost with their host
            ("dist_async", [2], 2, 1, [0, 0, 1, 2, 2]),
            ("dist_async", [3], 3, 0, [0, 0, 1, 2, 3]),
            ("dist_sync", [2], 2, 1, [0, 0, 1, 2, 1]),  # its memory is there all the same
            ("dist_sync", [2, 3], 3, 2, [0, 0, 1, 2, 3, 4, 5]),  # one after the other
        ]
    },
)
def test_a_mirror_has_the_rows_of_a_lost_host(
    tmp_path: Path, kind: str, victims: list[int], servers: int, spares: int, hosts: list[int]
) -> None:
    kills, clocks = {str(victim): 0.3 for victim in victims}, tuple(range(len(victims))) if spares else ()
    job = Job(kind, servers, spares=spares, steps=STEPS, kills=kills, clocks=clocks, hosts=tuple(hosts), mirrors=1)
    survive(tmp_path, job, 2 + servers + spares)


@pytest.mark.core(1)
@pytest.mark.parametrize("victim", [1, 3])
def test_pushes_count_once_in_an_asynchronous_store(tmp_path: Path, victim: int) -> None:
    survive(tmp_path, Job("dist_async", 2, spares=1, steps=2000, kills={str(victim): 0.2}), 5)


@pytest.mark.core(1)
@pytest.mark.parametrize("kind, victim, spares", [("dist_sync", 3, 1), ("dist_sync", 3, 0), ("dist_async", 3, 1)])
def test_rows_that_are_read_in_place_outlive_deaths(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, victim: int, spares: int
) -> None:
    monkeypatch.setenv("MPIPS_KERNELS", "numba")  # from the beginning
    steps = STEPS if kind == "dist_sync" else 2000
    survive(tmp_path, Job(kind, 2, spares=spares, steps=steps, kills={str(victim): 0.5}), 4 + spares)


@pytest.mark.slow
@first(2, seed=range(20))
def test_rows_outlive_deaths_at_drawn_moments(tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)
    spares = choice.choice([1, 2])
    victims = choice.sample(range(1, 4 + spares), choice.choice([1, 2]))
    while {2, 3} <= {*victims} and spares < 2:
        victims = choice.sample(range(1, 4 + spares), 2)
    kills = {str(victim): choice.random() * choice.choice([0.1, 1.0]) for victim in victims}
    survive(tmp_path, Job("dist_sync", 2, spares=spares, steps=STEPS, kills=kills), 4 + spares)


@pytest.mark.slow
@first(1, seed=range(20))
def test_a_host_is_lost_and_a_worker_dies_at_drawn_moments(tmp_path: Path, seed: int) -> None:
    choice = random.Random(seed)
    kind, servers, spares = choice.choice(["dist_sync", "dist_async"]), choice.choice([2, 3]), choice.choice([0, 1, 2])
    victims = [choice.randrange(2, 2 + servers), *choice.sample([1], choice.randrange(2))]
    begin = choice.random()
    kills = {str(victim): begin + choice.random() * choice.choice([0.05, 0.5]) for victim in victims}
    hosts = (0, 0, *range(1, 1 + servers + spares))
    survive(tmp_path, Job(kind, servers, spares=spares, steps=STEPS, kills=kills, hosts=hosts, mirrors=1), len(hosts))


@pytest.mark.slow
@pytest.mark.parametrize("program", [SAVES, OVERFLOWS], ids=["with a mirror", "after an update that overflows"])
def test_rows_are_there_after_a_recovery_without_deaths(tmp_path: Path, program: str) -> None:
    (tmp_path / "program.py").write_text(program)
    out = io.BytesIO()
    words = [sys.executable, "-m", "launch.cli", "run", "-w", "2", "-s", "2", "--spares", "0"]
    code = child.run([*words, str(tmp_path / "program.py"), str(tmp_path)], JOB_LIMIT, ROOT, out)
    assert code == 0 and out.getvalue().count(b"all is there") == 2, out.getvalue().decode()
