"""LocalSGD while processes are killed: the bits of a serial run in which the dead count for nothing."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch import find
from mpips.training.local import OUTER
from tests import child
from tests.mpi.sizes import JOB_LIMIT, only_on
from tests.mpi.torch.apart import ADAMW, loss_of
from tests.mpi.torch.support import network

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = find(python=sys.executable)
needs_ulfm = pytest.mark.skipif(LAUNCHER.flavour == "mpich", reason="a death ends every job of this MPI")
STEPS, EVERY = 16, 4


def job(folder: Path, roles: str, **plan: Any) -> list[dict[str, Any]]:
    """Return what the workers of `tests.mpi.torch.apart` say at the end, by rank."""
    start = [sys.executable, "-m", "launch.cli", "run", *roles.split()]
    said = BytesIO()
    plan = {"steps": STEPS, **plan, "local": {"every": EVERY, **plan.get("local", {})}}
    code = child.run([*start, "-m", "tests.mpi.torch.apart", json.dumps(plan), str(folder)], JOB_LIMIT, ROOT, said)
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("worker-*.json"))]
    assert found and not code, said.getvalue().decode(errors="replace")[-3000:]
    return found


def serial(workers: int, dies: tuple[int, int], spare: bool, steps: int = STEPS) -> list[str]:
    """Local SGD in one process. `dies`: a worker, and its last inner step; a spare goes on from the next exchange."""
    models = [network() for _ in range(workers)]
    inners = [torch.optim.AdamW(model.parameters(), **ADAMW) for model in models]
    views = [[p.detach().numpy() for p in model.parameters()] for model in models]
    centers = [view.copy() for view in views[0]]
    states = [OUTER["nesterov"].init(center.reshape(-1)) for center in centers]
    here = list(range(workers))
    for step in range(1, steps + 1):
        if step == dies[1]:
            here.remove(dies[0])
        for rank in here:
            inners[rank].zero_grad()
            loss_of(models[rank], step, rank if spare else here.index(rank)).backward()
            inners[rank].step()
        if step % EVERY:
            continue
        lost = workers - len(here) if spare else 0
        outer = replace(OUTER["nesterov"], rescale=1 / (len(here) + lost))
        for place, center in enumerate(centers):
            changes = [(center - views[rank][place]) * ((len(here) + lost) / len(here)) for rank in here]
            total = sum(changes[1:], changes[0])
            outer.update(center.reshape(-1), total.reshape(-1), states[place], step // EVERY)
        if lost:
            inners[dies[0]] = torch.optim.AdamW(models[dies[0]].parameters(), **ADAMW)
            here = list(range(workers))
        for rank in here:
            for mine, center in zip(views[rank], centers):
                mine[...] = center
    return [center.tobytes().hex() for center in centers]


@pytest.mark.core(1)
@only_on(1)
@needs_ulfm
@pytest.mark.parametrize("servers", [0, 1])
def test_a_dead_worker_counts_for_nothing_and_a_spare_goes_on(tmp_path: Path, servers: int) -> None:
    found = job(tmp_path, f"-w 3 -s {servers} --spares 1", kills=[[1, 6, -1]])
    expected = serial(3, (1, 6), True)
    assert [one["values"] for one in found] == [expected] * 3
    assert [one["began"] for one in found] == [0, 8, 0]


@pytest.mark.slow
@only_on(1)
@needs_ulfm
@pytest.mark.parametrize("servers", [0, 1])
def test_fewer_workers_go_on_by_their_own_mean(tmp_path: Path, servers: int) -> None:
    found = job(tmp_path, f"-w 3 -s {servers} --spares 0", kills=[[2, 6, -1]])
    assert [one["values"] for one in found] == [serial(3, (2, 6), False)] * 2


@pytest.mark.slow
@only_on(1)
@needs_ulfm
@pytest.mark.parametrize("local", [{}, {"fragments": 2, "delay": 1}], ids=str)
def test_a_dead_server_changes_no_bit(tmp_path: Path, local: dict[str, Any]) -> None:
    calm, deaths = tmp_path / "calm", tmp_path / "deaths"
    for folder in (calm, deaths):
        folder.mkdir()
    expected = job(calm, "-w 2 -s 2", local=local)
    found = job(deaths, "-w 2 -s 2 --spares 1", local=local, kills=[[3, 7, 0.5]])
    assert [one["values"] for one in found] == [one["values"] for one in expected]
    assert all(one["generation"] for one in found)


@pytest.mark.slow
@only_on(1)
@needs_ulfm
@pytest.mark.parametrize(
    "kind, local",
    [
        ("dist_sync", {"fragments": 2, "delay": 1, "keep": 0.25}),
        ("mpi_sync", {"by_tokens": True}),
        ("dist_async", {"outer": "average", "staleness": 1}),
    ],
    ids=str,
)
def test_training_goes_on_after_two_deaths(tmp_path: Path, kind: str, local: dict[str, Any]) -> None:
    found = job(tmp_path, "-w 3 -s 1 --spares 1", kind=kind, local=local, steps=40, kills=[[1, 6, 0.3], [2, 13, -1]])
    generations = (1, 2) if kind == "dist_async" else (2,)  # nobody waits, so one recovery may be of both deaths
    assert [one["workers"] for one in found] == [2, 2] and all(one["generation"] in generations for one in found)
    see_learnt(found[0]["values"])
    assert kind == "dist_async" or found[0]["values"] == found[1]["values"]


def see_learnt(values: list[str]) -> None:
    """Fail unless a model with these values has half of the first loss."""
    models = [network(), network()]
    for parameter, data in zip(models[1].parameters(), values):
        parameter.data.copy_(torch.from_numpy(np.frombuffer(bytes.fromhex(data)).copy()).view_as(parameter))
    first, learnt = (sum(loss_of(model, step, 0).item() for step in range(100, 120)) for model in models)
    assert learnt < 0.5 * first


@pytest.mark.core(1)
@only_on(1)
@needs_ulfm
@pytest.mark.parametrize(
    "quorum, kills, workers",
    [
        (2, [(1, 6, -1)], 3),  # a spare takes its place
        (3, [(1, 6, -1), (2, 22, 0.4)], 2),  # fewer are left than the quorum: all that are left count
        (2, [(3, 13, 0.5)], 3),  # the server
    ],
    ids=["worker", "two workers", "server"],
)
def test_a_quorum_goes_on_with_those_that_are_there(
    tmp_path: Path, quorum: int, kills: list[tuple[int, int, float]], workers: int
) -> None:
    local = {"outer": "average", "quorum": quorum, "grace_seconds": 0.05}
    found = job(tmp_path, "-w 3 -s 1 --spares 1", kind="dist_async", local=local, steps=40, kills=kills)
    assert [one["workers"] for one in found] == [workers] * workers
    assert all(one["generation"] == len(kills) for one in found)
    for one in found:
        see_learnt(one["values"])


@pytest.mark.slow
@only_on(1)
@needs_ulfm
@pytest.mark.parametrize(
    "local, kills, roles",
    [
        ({"quorum": 3}, [(3, 7, 0.5)], "-w 3 -s 2 --spares 0"),
        ({"quorum": 2}, [(1, 7, -1), (4, 13, 0.5)], "-w 3 -s 2 --spares 2"),
        ({"quorum": 2, "by_tokens": True, "fragments": 3}, [(2, 7, 0.0), (3, 7, 0.0)], "-w 3 -s 2 --spares 2"),
    ],
    ids=str,
)
def test_a_quorum_goes_on_when_hosts_are_lost_with_their_memory(
    tmp_path: Path, local: dict[str, Any], kills: list[tuple[int, int, float]], roles: str
) -> None:
    """Each rank is a host of its own: a server's copy lies on the other one. The last case is a worker and a server."""
    options = {"outer": "average", "grace_seconds": 0.05, "mirrors": 1, "shared_memory": False, **local}
    found = job(tmp_path, roles, kind="dist_async", local=options, steps=40, kills=kills)
    assert [one["workers"] for one in found] == [3] * 3 and all(one["generation"] for one in found)
    for one in found:
        see_learnt(one["values"])


REFUSED = """
import mpips.torch
import torch
from mpips.training import Local, Trainer
from tests.mpi.mpips.training.support import Line
from tests.mpi.torch.support import heard, network

model = network()
kv = mpips.create("mpi_async")
said = [heard(lambda: mpips.torch.LocalSGD(model, torch.optim.SGD(model.parameters(), 0.1), store=kv)),
        heard(lambda: Trainer(Line(), kv, "sgd", local=Local(3)))]
every = kv.layout.workers.allgather(said)
kv.barrier()
if kv.rank == 0:
    print(*said, every == [said] * 4, sep="\\n", flush=True)
kv.close()
"""


@only_on(1)
@needs_ulfm
def test_clients_of_several_workers_are_refused_with_spares_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, said = tmp_path / "refused.py", BytesIO()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for its names of the tests
    program.write_text(REFUSED)
    start = [sys.executable, "-m", "launch.cli", "run", "-w", "4", "-s", "1", "-c", "2", "--spares", "0", str(program)]
    assert not child.run(start, JOB_LIMIT, ROOT, said), said.getvalue()
    lines = said.getvalue().decode().splitlines()
    words = "has 4 in 2 clients: take", "or leave spares out"
    assert lines[-1] == "True" and all(word in line for word in words for line in lines[-3:-1]), lines


@pytest.mark.slow
@only_on(1)
@needs_ulfm
def test_the_example_learns(tmp_path: Path) -> None:
    said = BytesIO()
    start = [sys.executable, "-m", "launch.cli", "run", "-w", "2", "-s", "1", "--spares", "0", "examples/diloco.py"]
    assert not child.run([*start, "--steps", "40", "--every", "10"], JOB_LIMIT, ROOT, said), said.getvalue()
    losses = [float(line.split()[3].strip(",")) for line in said.getvalue().decode().splitlines() if "loss" in line]
    assert len(losses) == 4 and losses[-1] < losses[0] < 4.5, losses
