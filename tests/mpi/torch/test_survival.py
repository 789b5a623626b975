"""DistributedOptimizer while processes are killed: the losses are those of a job in which nobody dies, to the bit."""

from __future__ import annotations

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import mpips
import mpips.torch
from launch import find
from mpips.torch.optimizer.rejoin import StepPosition, meet
from tests import child
from tests.mpi.sizes import JOB_LIMIT, only_on
from tests.mpi.torch.support import WORLD, batch, network, train

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = find(python=sys.executable)
needs_ulfm = pytest.mark.skipif(LAUNCHER.flavour == "mpich", reason="a death ends every job of this MPI")


def job(folder: Path, workers: int, servers: int, spares: int, **plan: Any) -> dict[int, Any]:
    """What each worker of `tests.mpi.torch.survivors` says at its end, by rank."""
    folder.mkdir()
    spare = ["--spares", str(spares)] if spares >= 0 else []
    start = [sys.executable, "-m", "launch.cli", "run", "-w", str(workers), "-s", str(servers), *spare]
    said = BytesIO()
    code = child.run([*start, "-m", "tests.mpi.torch.survivors", json.dumps(plan), str(folder)], JOB_LIMIT, ROOT, said)
    found = [json.loads(path.read_text()) for path in folder.glob("worker-*.json")]
    assert found and not code, said.getvalue().decode(errors="replace")[-3000:]
    return {one["rank"]: one for one in found}


def losses(workers: dict[int, Any]) -> dict[tuple[int, int], str]:
    """By step and place."""
    return {(step, place): loss for one in workers.values() for step, place, loss in one["losses"]}


WORKERS = 3
PLANS = {
    "worker": (0, {"optimizer": "adamax", "kills": [[1, 4, 1.5]]}),
    "before": (0, {"optimizer": "adamax", "kills": [[0, 3, -1]], "saves": 2}),
    "worker of a server": (1, {"optimizer": "adam", "kills": [[2, 6, 2.0]], "saves": 3}),
    "server": (1, {"optimizer": "adam", "kills": [[3, 3, 0.0], [4, 5, 3.0], [5, 8, 1.0]]}),
}
"""How many servers there are, and who dies; the first spare takes the first one's place, and may die there."""
_undisturbed: dict[int, dict[int, Any]] = {}


@pytest.mark.core(1)
@only_on(1)
@needs_ulfm
@pytest.mark.parametrize("name", PLANS)
def test_a_spare_takes_the_place_of_one_that_is_killed(tmp_path: Path, name: str) -> None:
    servers, plan = PLANS[name]
    if servers not in _undisturbed:
        _undisturbed[servers] = job(tmp_path / "calm", WORKERS, servers, -1, optimizer=plan["optimizer"])
    deaths = len(plan["kills"])
    calm, found = _undisturbed[servers], job(tmp_path / "deaths", WORKERS, servers, deaths, **plan)
    assert sorted(found) == [0, 1, 2]
    assert {one["crc"] for one in found.values()} == {calm[0]["crc"]}
    assert {one["generation"] for one in found.values()} == {deaths}
    expected = losses(calm)
    for place, loss in losses(found).items():
        assert expected[place] == loss, place
    spare = WORKERS + servers
    if plan["kills"][0][0] < WORKERS:
        assert any(one["process"] == spare and one["resumed"] for one in found.values())
    if "saves" in plan:
        every = plan["saves"]
        assert {path.name for path in (tmp_path / "deaths").glob("step-*")} == {
            f"step-{step}" for step in range(every, 12, every)
        }


@pytest.mark.slow
@only_on(1)
@needs_ulfm
@pytest.mark.parametrize("servers", [0, 1])
def test_fewer_workers_go_on_as_if_they_had_begun_so(tmp_path: Path, servers: int) -> None:
    """The step in which a worker dies has the batches of three workers, and the mean of two of them."""
    at, optimizer, keep = 4, "adam", str(tmp_path / "state.pt")
    job(tmp_path / "three", WORKERS, servers, -1, optimizer=optimizer, last=at, keep=keep)
    two = job(tmp_path / "two", WORKERS - 1, servers, -1, optimizer=optimizer, first=at, saved=keep, odd=[0, 2])
    found = job(tmp_path / "deaths", WORKERS, servers, 0, optimizer=optimizer, kills=[[1, at, -1]])
    assert sorted(found) == [0, 1] and found[0]["workers"] == 2
    assert {one["crc"] for one in found.values()} == {two[0]["crc"]}


@only_on(3)
def test_what_is_no_death_reaches_the_caller() -> None:
    """A push and a step go over communicators of their own, so the limit on waits ends them."""
    model, store = network(), mpips.create("dist_sync", timeout_seconds=3)
    optimizer = mpips.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), store=store
    )
    train(model, optimizer, 2, batch)
    heard = ""
    try:
        if WORLD.rank == 1:  # a bug on one rank
            optimizer.store.push("0.bias", torch.zeros(16, dtype=torch.float64))
        train(model, optimizer, 1, batch)
    except mpips.StoreError as error:
        heard = str(error)
    everybody = WORLD.allgather(heard)
    assert len(set(everybody)) == 1 and everybody[0]


def test_where_a_new_worker_goes_on() -> None:
    new = StepPosition(0, 0, False, True)
    pushing, behind = StepPosition(5, 0, True, False), StepPosition(5, 1, False, False)
    assert meet([new, pushing, pushing], True)[:4] == (1, 5, False, 0)
    assert meet([StepPosition(5, 0, False, False), new], True)[:4] == (0, 4, True, 0)  # the others have ended step 4
    assert meet([new, behind, behind], True)[:4] == (1, 4, True, 0)  # it makes the call, too
    assert meet([new, behind, pushing], True)[:4] == (1, 5, False, 1)  # the call is over
    assert meet([new, behind, StepPosition(5, 2, False, False)], True)[:4] == (1, 4, True, 1)
    assert meet([new, StepPosition(9, 0, True, False), pushing], False)[:3] == (1, 4, False)
    assert "before the first step" in meet([new, StepPosition(0, 1, False, False)], True).refusal
    assert not meet([StepPosition(0, 1, False, False)] * 2, True).refusal
    assert "no worker is left" in meet([new, new], True).refusal
