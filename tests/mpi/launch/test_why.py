"""`mpips why` of jobs that stand, are slow, or have died, each in another way: it names rank, line and call."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from mpi4py import MPI

from launch import find
from launch.mpirun import find_obstacle_to_survival
from launch.observe.gather import jobs
from launch.observe.live import History
from tests.child import outside, wait_for

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")
PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpips

def batch():
    if step == 9 and kv.rank == {late}:
        open("there", "w").close()
        {does}

kv = mpips.create("dist_sync")
{before}
gradient = np.ones(1000, np.float32)
kv.init("w", gradient)
kv.init("v", gradient)
for step in range(100_000):
    batch()
    {beside}
    kv.pushpull("w", gradient)
"""
SURVIVOR = """
import time
import numpy as np
import mpips

kv = mpips.create("dist_sync")
step = kv.resumed
while True:
    try:
        kv.init("w", np.ones(1000, np.float32))
        while True:
            kv.pushpull("w", np.zeros(1000, np.float32))
            step += 1
            mpips.note(step=step)
            time.sleep(0.01)
            if step == 9:
                open("there", "w").close()
    except mpips.StoreError:
        step = kv.recover().step
"""
OPTIMIZER = """
import time
from dataclasses import dataclass
import numpy as np
import mpips

@mpips.optimizers.register
@dataclass(frozen=True)
class Lion(mpips.optimizers.Equation):
    slots = 0
    def numbers(self, step):
        if step == 9:
            open("there", "w").close()
            time.sleep(99)
        return ()
    def equation(self, weight, gradient, state, numbers):
        return weight - gradient, ()

kv = mpips.create("dist_sync")
kv.init("w", np.ones(1000, np.float32))
kv.set_optimizer("lion")
for step in range(100_000):
    kv.pushpull("w", np.ones(1000, np.float32))
"""
TABLES = """
import time
import numpy as np
import mpips

def batch():
    if step == 9:
        open("there", "w").close() if kv.rank == {late} else None
        {does}

kv = mpips.create("dist_sync", servers=1)
users = kv.table("users", dim=4, learning_rate=0.1)
items = kv.table("items", dim=4, learning_rate=0.1, admit=mpips.seen(9))
ids = np.arange(100) + 100 * kv.rank
for step in range(100_000):
    batch()
    gradients = users.pull(ids)
    items.push(ids + step, gradients)
    users.push(ids + step % 10, gradients)
    users.pull(ids)
    mpips.note(step=step)
"""
EXIT = """
import atexit, time
import numpy as np
import collectives
from mpi4py import MPI

def late():
    time.sleep(1)
    open("there", "w").close()
    time.sleep(99)

collectives.allreduce(np.ones(10, np.float32))
if MPI.COMM_WORLD.Get_rank() == 1:
    atexit.register(late)
"""
SECOND_STORE = "other = mpips.create('dist_sync'); other.init('w', np.ones(1000, np.float32))"


class Case(NamedTuple):
    """One way to hang or slow down a job of three workers: what rank `late` does in step 9, and what all do in each.

    `said`: what `mpips why` says of it, among more. `kind`: as what it sees the job. `culprits`: the ranks to look at;
    none: these may differ.
    """

    does: str
    said: str
    beside: str = "pass"
    before: str = ""
    late: int = 1
    kind: str = "stands"
    servers: int = 0
    culprits: tuple[int, ...] = (1,)
    program: str = PROGRAM


CASES = {
    "loop": Case("while True: pass", "rank 1, which is in Python code outside mpips (program.py:9, batch: `while True"),
    "input": Case(
        "input()",
        "rank 0, which is in Python code outside mpips (program.py:9, batch: `input()`)",
        late=0,
        culprits=(0,),
    ),
    "stopped": Case(
        "os.kill(os.getpid(), signal.SIGSTOP)", "rank 1, which is stopped by a signal: `kill -CONT", servers=1
    ),
    "slow file": Case(
        "os.mkfifo('slow'); open('slow').read()", "batch: `os.mkfifo('slow'); open('slow').read()`)", servers=1
    ),
    "another key": Case(
        "kv.pushpull('v', gradient)",
        "ranks 0, 2 call push of key 'w' (allreduce",
        kind="ended",
        culprits=(0, 1, 2),
    ),
    "another key, of a server": Case(
        "kv.pushpull('v', gradient)", "use keys in the same order on all ranks", kind="ended", servers=1, culprits=()
    ),
    "table": Case(
        "while True: pass",
        "ranks 0, 2 wait in pull of table 'rows' after push 10 (program.py:",
        "rows.push(ids, gradient.reshape(10, 100)); rows.pull(ids)",
        "rows, ids = kv.table('rows', dim=100), np.arange(10)",
        servers=1,
    ),
    "barrier": Case("time.sleep(99)", "ranks 0, 2 wait in barrier (program.py:", "if step == 9: kv.barrier()"),
    "two stores": Case(
        "pass",
        " of ranks 0, 1, 2 (program.py:18), which ranks 0, 2",
        "if kv.rank == 1 or step < 9: other.pushpull('w', gradient)",
        SECOND_STORE,
        culprits=(0, 1, 2),
    ),
    "full disk": Case(
        "open('/dev/full', 'w').write('x' * 100_000)",
        "Rank 1 said: OSError: [Errno 28] No space left on device (program.py:9)",
        kind="ended",
    ),
    "half speed": Case(
        "pass", "rank 1 holds the others up: it waits", "time.sleep(0.05 if kv.rank == 1 else 0.02)", kind="slow"
    ),
    "another thread": Case(
        "import threading; _ = threading.Thread(target=lambda: time.sleep(99)); _.start(); _.join()",
        "0 % CPU; its other thread is at program.py:9, <lambda>",
    ),
    "no ptrace": Case(
        "import ctypes; ctypes.CDLL(None).prctl(4, 0); time.sleep(99)",
        "rank 1, which is in Python code outside mpips (program.py:9, batch",
    ),
    "optimizer": Case(
        "",
        "for rank 3 (server), which is in Python code outside mpips (program.py:14, numbers: `",
        servers=1,
        culprits=(3,),
        program=OPTIMIZER,
    ),
    "exit": Case(
        "",
        "ranks 0, 2 have ended their programs, and wait in MPI's end for rank 1, which is in Python code "
        "outside mpips (program.py:10, late",
        program=EXIT,
    ),
    "another program": Case("os.execvp('sleep', ['sleep', '20'])", "has become another program by exec, `sleep 20`"),
}


@contextmanager
def running(folder: Path, case: Case, **variables: str) -> Iterator[str]:
    """A job of three workers, from where one of them does what it does; its name."""
    (folder / "program.py").write_text(case.program.format(**case._asdict()))
    spares = ["--spares", "1"] if case.program is SURVIVOR else []
    words = [sys.executable, "-m", "launch.cli", "run", "-w", "3", "-s", str(case.servers), *spares, "program.py"]
    job = subprocess.Popen(
        words,
        cwd=folder,
        env={**outside(), **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(folder / "there", job)
        yield str(job.pid)
    finally:
        job.terminate()
        try:
            job.communicate(timeout=20)
        finally:
            job.kill()


def why(name: str) -> dict[str, Any]:
    begun = time.monotonic()
    words = [sys.executable, "-m", "launch.cli", "why", name, "--json"]
    done = subprocess.run(words, env=outside(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    found["took"] = time.monotonic() - begun
    return found


def seconds_to_start() -> float:
    """Return how long a command takes that asks nobody, on cores that others may have, too."""
    begun = time.monotonic()
    words = [sys.executable, "-m", "launch.cli", "why", "--help"]
    subprocess.run(words, env=outside(), capture_output=True, timeout=60, check=True)
    return time.monotonic() - begun


def ask_until(name: str, right: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return what `mpips why` says of a job once it is right. Ranks that wait for a core come late: ask for a while."""
    limit = time.monotonic() + 60
    while not right(found := why(name)) and time.monotonic() < limit:
        time.sleep(0.2)
    return found


def wait_until_over(name: str) -> dict[str, Any]:
    """Return what `mpips why` says of a job once all its processes have ended."""
    limit = time.monotonic() + 30
    while os.path.exists(f"/proc/{name}/exe") and time.monotonic() < limit:  # a zombie has none
        time.sleep(0.1)
    return why(name)


@pytest.mark.core(4)
@pytest.mark.parametrize("name", CASES)
def test_the_cause_of_each_hang_is_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]

    def is_right(found: dict[str, Any]) -> bool:
        named = not case.culprits or tuple(found["culprits"]) == case.culprits
        return found["kind"] == case.kind and case.said in found["sentence"] and named

    with running(tmp_path, case) as job:
        found = ask_until(job, is_right)
        late = seconds_to_start() if found["took"] > 4 else 0.0
    print(f"\n{name}: {found['sentence']} [{found['took']:.1f} s]")
    assert is_right(found), found
    assert found["took"] < 5 + late  # two, on cores of its own


@pytest.mark.slow
def test_an_interrupted_job_says_who_told_it_to_end(tmp_path: Path) -> None:
    with running(tmp_path, CASES["loop"]) as name:
        os.kill(int(name), signal.SIGTERM)
        assert wait_until_over(name)["sentence"].endswith("its `mpips run` was told to end by SIGTERM.")


@pytest.mark.core(1)
@pytest.mark.parametrize(
    ("victim", "case", "last_call"),
    [
        (1, Case("pass", "", servers=1), "pushpull of key 'w'"),
        (3, Case("pass", "", servers=1), "sum of key 'w'"),
        (2, CASES["table"]._replace(does="time.sleep(99)"), "pull of table 'rows'"),
        (
            2,
            Case("time.sleep(99)", "", "other.pushpull('x', gradient)", SECOND_STORE.replace("'w'", "'x'")),
            "pushpull of key 'w' or pushpull of key 'x' (its last calls in 2 stores)",
        ),
    ],
)
def test_the_last_call_of_a_killed_rank_is_known_when_all_is_over(
    victim: int, case: Case, last_call: str, tmp_path: Path
) -> None:
    with running(tmp_path, case) as name:
        pids = {one["rank"]: one["pid"] for one in why(name)["ranks"]}
        os.kill(pids[victim], signal.SIGKILL)
        found = wait_until_over(name)
    assert found["kind"] == "ended" and found["culprits"] == [victim], found["sentence"]
    assert {one["rank"]: one["last_call"] for one in found["ranks"]}[victim] == last_call
    assert "was ended by SIGKILL" in found["sentence"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("raise ValueError('bad batch 7')", "Rank 1 said: ValueError: bad batch 7 (program.py:9)"),
        ("sys.exit(3)", "Rank 1 said: exit code 3"),
    ],
)
def test_what_a_program_has_raised_is_known_when_all_is_over(end: str, said: str, tmp_path: Path) -> None:
    with running(tmp_path, Case(end, "")) as name:
        found = wait_until_over(name)
    assert (found["kind"], found["culprits"]) == ("ended", [1]) and said in found["sentence"], found["sentence"]


@pytest.mark.slow
def test_who_takes_a_place_is_told_and_counters_go_on(tmp_path: Path) -> None:
    metrics = pytest.importorskip("launch.observe.metrics")
    parse = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families
    if obstacle := find_obstacle_to_survival(find()):
        pytest.skip(obstacle)

    def counts() -> dict[tuple[str, str], float]:
        text = metrics.write(tmp_path, name).read_text()
        return {(one.name, one.labels["rank"]): one.value for family in parse(text) for one in family.samples}

    with running(tmp_path, Case("", "", program=SURVIVOR)) as name:
        (folder,) = [path for path in jobs() if path.name == name]
        history = History(folder)
        history.look()
        before = counts()
        os.kill(next(one["pid"] for one in why(name)["ranks"] if one["rank"] == 1), signal.SIGKILL)
        limit = time.monotonic() + 30
        while b"has become" not in history.to_json() and time.monotonic() < limit:
            history.look()
        found = ask_until(name, lambda found: found["kind"] in ("runs", "slow") and 1 not in found["culprits"])
        after = counts()
    assert b"rank 3, a spare, has become worker 1" in history.to_json() and b"rank 1 is gone" in history.to_json()
    assert found["kind"] in ("runs", "slow") and 1 not in found["culprits"], found["sentence"]
    assert ("mpips_rank_up", "1") in before and ("mpips_rank_up", "1") not in after
    assert all(after[key] >= before[key] for key in before if key[0].endswith("_total") and key[1] in "02")
    assert after["mpips_calls_total", "0"] > before["mpips_calls_total", "0"] and after["mpips_generation", "3"] == 1


@pytest.mark.slow
def test_top_in_a_pipe_shows_rates_in_lines_that_fit(tmp_path: Path) -> None:
    case = Case("pass", "", "time.sleep(0.02); mpips.note(step=step)", servers=1)
    with running(tmp_path, case) as name, open(tmp_path / "top.txt", "w+", encoding="utf-8") as out:
        words = [sys.executable, "-m", "launch.cli", "top", name]
        table = subprocess.Popen(words, env={**outside(), "COLUMNS": "70"}, stdout=out)
        once = subprocess.run([*words, "--json"], env=outside(), capture_output=True, text=True, timeout=60, check=True)
        limit = time.monotonic() + 30
        while (shown := (tmp_path / "top.txt").read_text()).count("steps/s") < 2 and time.monotonic() < limit:
            time.sleep(0.2)
        table.kill()
        table.wait()
    assert shown.count("steps/s") >= 2
    assert all(len(line) <= 70 for line in shown.splitlines() if not line.startswith("job"))
    *workers, server = json.loads(once.stdout)["ranks"]
    assert all(1 < one["steps_per_second"] < 60 for one in workers)
    for one in workers:  # 4,000 bytes a step
        assert one["queued"] is None and 0.5 < one["bytes_per_second"] / (4000 * one["steps_per_second"]) < 2
    assert 0 <= server["queued"] <= 3 and 1.5 < server["bytes_per_second"] / workers[0]["bytes_per_second"] < 6


@pytest.mark.slow
def test_tables_are_seen_from_outside(tmp_path: Path) -> None:
    case = Case("pass", "", servers=1, program=TABLES)
    with running(tmp_path, case) as name:
        words = [sys.executable, "-m", "launch.cli", "top", name]
        environment = {**outside(), "COLUMNS": "200"}
        limit, rates = time.monotonic() + 30, dict[str, float]()
        while not rates.get("updates") and time.monotonic() < limit:  # a server that waits for a core says so late
            shown = subprocess.run([*words, "--json"], env=environment, capture_output=True, text=True, check=True)
            *workers, server = json.loads(shown.stdout)["ranks"]
            rates = server["tables"]["users"]["per_second"]
        table = subprocess.run([*words, "--once"], env=environment, capture_output=True, text=True, check=True).stdout
    assert rates["updates"] > 0 and server["table_room_bytes"] > 0
    users, items = (server["tables"][name]["numbers"] for name in ("users", "items"))
    assert users["rows"] == 309 and users["bytes"] > 309 * 16 and items["refused"] >= 2400 and items["counted"] > 0
    for one in workers:
        numbers = one["tables"]["users"]["numbers"]
        assert numbers["pushed"] >= 1000 and abs(numbers["in_place"] + numbers["asked"] - 2 * numbers["pushed"]) <= 200
    lines = [line.split() for line in table.splitlines()]
    assert ["users", "3", "309"] in [line[:3] for line in lines] and ["items", "0"] in [line[:2] for line in lines]


@pytest.mark.slow
def test_top_shows_what_collectives_move(tmp_path: Path) -> None:
    case = Case(
        "",
        "",
        program="""
import time
import numpy as np
import collectives
import mpips

x, step = np.ones(250_000, np.float32), 0
while True:
    collectives.allreduce(x, op="mean")
    time.sleep(0.05)
    step += 1
    mpips.note(step=step)
    if step == 9:
        open("there", "w").close()
""",
    )
    with running(tmp_path, case) as name:
        words = [sys.executable, "-m", "launch.cli", "top", name, "--json"]
        shown = subprocess.run(words, env=outside(), capture_output=True, text=True, timeout=60, check=True).stdout
    for one in json.loads(shown)["ranks"]:  # 1 MB in 0.05 s or more
        assert 0.5 < one["bytes_per_second"] / (1e6 * one["steps_per_second"]) < 2 and one["bytes_per_second"] <= 22e6


@pytest.mark.slow
def test_two_launches_in_one_allocation_are_two_jobs(tmp_path: Path) -> None:
    launcher, allocation = find(), f"a{os.getpid()}"
    (tmp_path / "program.py").write_text("""
import sys, time
import numpy as np
from mpi4py import MPI
import collectives

for step in range(100_000):
    if step == 9 and MPI.COMM_WORLD.rank == 1:
        open(sys.argv[1], "w").close()
        time.sleep(99 if sys.argv[1] == "hangs" else 0)
    collectives.allreduce(np.zeros(1000, np.float32))
    time.sleep(0.01)
""")
    options = ["--oversubscribe", "--allow-run-as-root"] if launcher.flavour == "openmpi" else []
    words = [launcher.path, *options, "-n", "2", "env", f"SLURM_JOB_ID={allocation}", sys.executable, "program.py"]
    launches = [
        subprocess.Popen([*words, does], cwd=tmp_path, env=outside(), stdin=subprocess.DEVNULL)
        for does in ("hangs", "goes")
    ]
    try:
        for does, launch in zip(("hangs", "goes"), launches):
            wait_for(tmp_path / does, launch)
        limit = time.monotonic() + 60
        known = [path.name for path in jobs() if path.name.startswith(allocation)]
        while True:  # one that waits for a core has not waited for another rank for long
            found = [why(name) for name in known]
            kinds = sorted(one["kind"] in ("runs", "slow") for one in found)
            if kinds == [False, True] or time.monotonic() > limit:
                break
    finally:
        for one in launches:
            one.terminate()
            one.wait(20)
    assert kinds == [False, True], known
    (hung,) = (one for one in found if one["kind"] == "stands")
    assert hung["culprits"] == [1] and len(hung["ranks"]) == 2


@pytest.mark.slow
def test_a_job_without_pages_says_so(tmp_path: Path) -> None:
    with running(tmp_path, CASES["loop"], MPIPS_RECORDER="0") as name:
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", "why", name],
            env=outside(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2 and f"job {name} runs with MPIPS_RECORDER=0, so its ranks have no pages" in done.stderr


def test_a_job_that_has_not_begun_mpips_says_so(tmp_path: Path) -> None:
    program = "import time\nopen('there', 'w').close()\ntime.sleep(99)\n"
    with running(tmp_path, Case("", "", program=program)) as name:
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", "why", name],
            env=outside(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 2 and f"job {name} runs, and none of its ranks here has a page: none has" in done.stderr


@pytest.mark.slow
def test_a_job_that_ends_well_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import mpips\nmpips.create('dist_sync').close()\n")
    words = [sys.executable, "-m", "launch.cli", "run", "-w", "2", "program.py"]
    job = subprocess.Popen(words, cwd=tmp_path, env=outside())
    assert job.wait(60) == 0
    assert str(job.pid) not in [path.name for path in jobs()]
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "why", str(job.pid)],
        env=outside(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2 and f"there is no job '{job.pid}' of yours on this machine" in done.stderr
