"""`mpips run --trace` and `--summary`, and `mpips trace`, of jobs that go well, lose a rank, or run on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from collectives.recorder import folders, tracing
from tests.child import outside, wait_for
from tests.mpi.jobs import job
from tests.mpi.sizes import JOB_LIMIT, only_on
from tests.perfetto import check_in_perfetto, why_not
from tests.timeline import WAYS, read_flows

STEPS, WORKERS, SERVERS = 50, 4, 2
PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpips

kv = mpips.create("dist_sync")
gradient, out = np.ones(1000, np.float32), np.zeros(1000, np.float32)
kv.init(["w", "b"], [gradient, gradient])
for step in range({steps}):
    if kv.rank == 1:
        {beside}
    kv.push("w", gradient)
    kv.pull("w", out)
    kv.pushpull("b", gradient, out)
    mpips.note(step=step)
    if step == 9 and kv.rank == 0:
        open("there", "w").close()
"""


def start(folder: Path, words: Sequence[str], beside: str = "pass", steps: int = STEPS) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM.format(steps=steps, beside=beside))
    job = [sys.executable, "-m", "launch.cli", "run", "-w", str(WORKERS), "-s", str(SERVERS), *words, "program.py"]
    return subprocess.Popen(job, cwd=folder, env=outside(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@only_on(1)
def test_every_push_leads_to_its_sum_and_pull(tmp_path: Path) -> None:
    job = start(tmp_path, ["--trace", "t.json", "--summary", "--summary-json", "s.json"])
    said = job.communicate(timeout=JOB_LIMIT)[0]
    assert job.returncode == 0, said
    trace = json.loads((tmp_path / "t.json").read_text())
    joined = read_flows(trace)
    shards = sum(event["ph"] == "X" and event["cat"] == "sum" for event in trace["traceEvents"]) // STEPS
    assert shards >= 2
    assert len(joined) == shards * WORKERS * STEPS
    assert all(kinds in WAYS for kinds in joined)
    assert sum(kinds[0] == "push" for kinds in joined) + WORKERS * STEPS == len(joined), "b is not cut into shards"
    assert all(not one["overwritten"] for one in trace["otherData"]["ranks"])
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert [name.rpartition(" on ")[0] for name in names] == [
        *(f"rank {rank} (worker)" for rank in range(4)),
        "rank 4 (server)",
        "rank 5 (server)",
    ]
    steps = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == "step"]
    assert {(event["pid"], event["name"]) for event in steps} == {(r, f"step {s}") for r in range(4) for s in range(50)}
    summary = json.loads((tmp_path / "s.json").read_text())
    calls = {(line["operation"], line["nbytes"]): line["calls"] for line in summary["calls"]}
    assert calls["push", 4000] == calls["pushpull", 4000] == WORKERS * STEPS
    assert [one["rank"] for one in summary["ranks"]] == list(range(WORKERS + SERVERS))
    assert "straggler" in said


TWO_STORES = """
import numpy as np
import mpips

one, other = mpips.create("dist_sync"), mpips.create("dist_sync")
array, out = np.ones(1000, np.float32), np.ones(1000, np.float32)
one.init("w", array)
other.init("w", array)
for step in range({steps}):
    for store in (one, other) if step % 2 else (other, one):
        store.push("w", array)
    mpips.note(step=step)
    one.pull("w", out)
    other.pull("w", out)
"""


@pytest.mark.slow
@only_on(1)
def test_arrows_stay_within_their_store_and_steps_are_no_calls(tmp_path: Path) -> None:
    done = job(tmp_path, TWO_STORES.format(steps=10), "-w 2 -s 1 --trace t.json --summary-json s.json")
    assert done.returncode == 0, done.stderr
    trace = json.loads((tmp_path / "t.json").read_text())
    begins = [(event["pid"], event["ts"]) for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(read_flows(trace)) == len(begins) == len(set(begins)) == 2 * 2 * 10, "each push has one arrow"
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    calls = [event for event in bars if event["cat"] not in ("compute", "receive", "step")]
    assert f"t.json: {len(calls)} calls of 3 ranks, 40 arrows" in done.stderr
    counted = {one["rank"]: one["calls"] for one in json.loads((tmp_path / "s.json").read_text())["ranks"]}
    assert counted == {rank: sum(event["pid"] == rank for event in calls) for rank in range(3)}


TABLES = """
import numpy as np
import mpips

kv = mpips.create("dist_sync", servers=1)
table, ids = kv.table("users", dim=4, learning_rate=0.1), np.arange(100)
for step in range(10):
    handle = table.ipull(ids[: 10 + step])
    table.push(ids[: 10 + step], handle.wait())
    table.pull(ids[: 10 + step])
kv.init("w", np.ones(9, np.float32))
kv.pull("w", np.ones(9, np.float32), newer_than=-1)
"""


@pytest.mark.slow
@only_on(1)
def test_calls_of_tables_are_in_the_trace_and_a_line_of_the_summary(tmp_path: Path) -> None:
    assert not job(tmp_path, TABLES, "-w 2 -s 1 --trace t.json --summary-json s.json").returncode
    trace = json.loads((tmp_path / "t.json").read_text())
    joined = read_flows(trace)
    assert len(joined) == 2 * 10 and all(kinds[:2] == ["push", "update"] for kinds in joined)
    names = Counter((event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] == "X")
    for rank in range(2):
        assert names[rank, "push table 'users'"] == 10 and names[rank, "pull table 'users'"] == 20
        assert names[rank, "pull 'w'"] == 1
    assert names[2, "update table 'users'"] == 10
    lines = {one["operation"]: one for one in json.loads((tmp_path / "s.json").read_text())["calls"]}
    assert lines["pull of table 'users'"]["calls"] == 40 and lines["push of table 'users'"]["nbytes"] == 16 * 14.5


@only_on(1)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_perfetto_connects_every_push(tmp_path: Path) -> None:
    job = start(tmp_path, ["--trace", "t.json"])
    said = job.communicate(timeout=JOB_LIMIT)[0]
    assert job.returncode == 0, said
    trace = json.loads((tmp_path / "t.json").read_text())
    check_in_perfetto(tmp_path / "t.json", trace)


@pytest.mark.slow
@only_on(1)
def test_killed_rank_is_in_the_trace(tmp_path: Path) -> None:
    job = start(tmp_path, ["--trace", "t.json"], "step == 30 and os.kill(os.getpid(), signal.SIGKILL)")
    said = job.communicate(timeout=JOB_LIMIT)[0]
    assert job.returncode, said
    trace = json.loads((tmp_path / "t.json").read_text())
    mine = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["pid"] == 1]
    assert sum(event["cat"] == "push" for event in mine) == 30
    assert len([one for one in read_flows(trace) if one[0] == "push"]) >= 4 * 30


@pytest.mark.slow
@only_on(1)
def test_running_job_is_traced_for_seconds(tmp_path: Path) -> None:
    job = start(tmp_path, [], "time.sleep(0.01)", steps=100_000)
    try:
        wait_for(tmp_path / "there", job)
        words = [sys.executable, "-m", "launch.cli", "trace", str(job.pid), "-o", "t.json", "--seconds"]
        flows, seconds = list[int](), 1
        while len(flows) < 2 or (flows[-1] <= 50 and seconds < 60):  # it can be asked for again
            subprocess.run([*words, str(seconds)], cwd=tmp_path, env=outside(), check=True, timeout=120)
            trace = json.loads((tmp_path / "t.json").read_text())
            about = trace["otherData"]
            assert about.get("seconds", 0) < seconds + 4  # a rank that waits for a core begins late
            assert {one["rank"] for one in about["ranks"]} == set(range(6))
            flows.append(len(read_flows(trace)) if "seconds" in about else 0)
            seconds *= 1 if flows[-1] > 50 else 4  # where the ranks share a core they make few steps in a second
        assert flows[-1] > 50, flows
    finally:
        job.send_signal(signal.SIGINT)
        try:
            job.communicate(timeout=20)
        finally:
            job.kill()


@pytest.mark.slow
@only_on(1)
def test_trace_ends_with_its_job(tmp_path: Path) -> None:
    until_traced = "while step == 30 and not os.path.exists('traced'): time.sleep(0.01)"
    job = start(tmp_path, [], until_traced)
    try:
        wait_for(tmp_path / "there", job)
        words = [sys.executable, "-m", "launch.cli", "trace", str(job.pid), "--seconds", "500", "-o", "t.json"]
        traced = subprocess.Popen(words, cwd=tmp_path, env=outside())
        pages = folders.jobs_folder() / str(job.pid)
        while len([*pages.glob(f"*{tracing.SUFFIX}")]) < WORKERS + SERVERS:
            assert traced.poll() is None
            time.sleep(0.01)
        (tmp_path / "traced").touch()
        assert traced.wait(60) == 0
        trace = json.loads((tmp_path / "t.json").read_text())
        assert len(read_flows(trace)) > 50
        assert job.wait(20) == 0
        assert not (folders.jobs_folder() / str(job.pid)).exists(), "memory is left"
    finally:
        job.kill()
