"""PyTorch's interface for faults: process groups that are made anew from living processes, on 3 and on 7 ranks."""

from __future__ import annotations

import json
import re
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launch import find
from tests import child
from tests.mpi.sizes import JOB_LIMIT, only_on
from tests.mpi.torch.support import WORLD, heard

ROOT = Path(__file__).resolve().parents[3]
LAUNCHER = find(python=sys.executable)
needs_ulfm = pytest.mark.skipif(LAUNCHER.flavour == "mpich", reason="a death ends every job of this MPI")
needs_interface = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="this PyTorch has no interface for faults"
)
workers = pytest.mark.parametrize("workers", [3, pytest.param(7, marks=pytest.mark.slow)])
# number of workers -> what each rank has seen, by its rank in the job and by the case
_seen: dict[int, dict[int, dict[str, Any]]] = {}


def seen(case: str, workers: int, folder: Path, seed: int = 1) -> dict[int, Any]:
    """Return what the ranks of one job have seen in a case. All cases of as many workers are of the same job."""
    if workers not in _seen:
        trains = ["ddp"] if workers == 3 else []
        _seen[workers] = run("tests.mpi.torch.reconfigured", folder, workers, 2, str(seed), *trains)
    return {rank: one[case] for rank, one in _seen[workers].items() if case in one}


def run(program: str, folder: Path, workers: int, spares: int, *words: str) -> dict[int, Any]:
    """Run a job and return what each rank has written to the folder, by its rank in the job."""
    start = [sys.executable, "-m", "launch.cli", "run", "-w", str(workers), "--spares", str(spares)]
    said = BytesIO()
    code = child.run([*start, "-m", program, str(folder), *words], JOB_LIMIT, ROOT, said)
    assert not code, said.getvalue().decode(errors="replace")[-3000:]
    return {int(path.stem[5:]): json.loads(path.read_text()) for path in folder.glob("rank-*.json")}


def ours(function: Any) -> Any:
    """Mark a test of a job with deaths."""
    for mark in (pytest.mark.core(1), only_on(1), needs_ulfm, needs_interface, workers):
        function = mark(function)
    return function


@ours
def test_the_same_ranks_and_another_order(tmp_path: Path, workers: int) -> None:
    for before, *made in seen("identity", workers, tmp_path).values():
        assert "has no members yet" in before and made == ["", "", ""]


@ours
def test_a_group_of_one(tmp_path: Path, workers: int) -> None:
    found = seen("one", workers, tmp_path)
    assert found and set(map(tuple, found.values())) == {("", "")}


@ours
def test_two_groups_split_and_merge(tmp_path: Path, workers: int) -> None:
    found = seen("split_and_merge", workers, tmp_path)
    assert found and set(map(tuple, found.values())) == {("", "")}


@ours
def test_wrong_handles_and_uuids_are_named(tmp_path: Path, workers: int) -> None:
    found = seen("wrong", workers, tmp_path)
    assert found
    for one in found.values():
        assert {words: words in said for words, said in one["refused"].items()} == dict.fromkeys(one["refused"], True)
        assert "different handles" in one["unlike"], one
        assert one["lives"] == one["after"] == ""


@ours
def test_a_stale_handle_ends_the_attempt_on_all(tmp_path: Path, workers: int) -> None:
    found = seen("stale", workers, tmp_path)
    assert found and all("of rank 0 of the job is stale" in said and after == "" for said, after in found.values())


@ours
def test_one_that_is_not_in_the_list_disturbs_nobody(tmp_path: Path, workers: int) -> None:
    found = seen("outsider", workers, tmp_path)
    assert "no handle is that of this process" in found[workers - 1][0]
    assert [said for rank, (said, _) in found.items() if rank != workers - 1] == [""] * (workers - 1)
    assert all(after == "" for _, after in found.values())


@ours
def test_one_that_does_not_come_is_named_at_the_timeout(tmp_path: Path, workers: int) -> None:
    found = seen("absent", workers, tmp_path)
    assert found and all(after == "" for _, after in found.values())
    assert all("rank 0 has not come" in late for rank, (late, _) in found.items() if rank != 0)


@ours
def test_one_that_does_not_come_to_new_group_is_named_at_the_timeout(tmp_path: Path, workers: int) -> None:
    found = seen("late_in_new_group", workers, tmp_path)
    assert found and all(late and after == "" for late, after in found.values()), found
    assert all("new_group has waited for 1 s: rank 0 has not come" in late for late, _ in found.values()), found


@ours
def test_one_that_is_stopped_is_awaited_until_the_timeout(tmp_path: Path, workers: int) -> None:
    """When it wakes, it hears why the group has ended, and can be in the next one."""
    found = seen("stopped", workers, tmp_path)
    assert found
    for short, late, without, after in found.values():
        assert short == without == after == "" and "rank 1 has not come" in late, found


@ours
def test_the_survivors_of_a_kill_go_on(tmp_path: Path, workers: int) -> None:
    found = seen("shrink", workers, tmp_path)
    assert found
    for one in found.values():
        assert all("rank 1" in said for said in one["errors"]), one["errors"]
        assert one["left"] == ""


@ours
def test_a_spare_joins_and_trains_on_from_a_peer_s_state(tmp_path: Path, workers: int) -> None:
    check_trained(seen("grow", workers, tmp_path))


@ours
def test_one_dies_and_a_spare_joins_in_the_same_call(tmp_path: Path, workers: int) -> None:
    found = seen("shrink_and_grow", workers, tmp_path)
    assert all("rank 0" in said or rank == workers + 1 for rank, (*_, said) in found.items()), found
    check_trained(found)


def check_trained(found: dict[int, Any]) -> None:
    assert found and all(made == "" and near for made, (near, _), *_ in found.values())
    assert len({str(weights) for _, (_, weights), *_ in found.values()}) == 1


@ours
def test_a_death_during_reconfigure_is_an_error_soon(tmp_path: Path, workers: int) -> None:
    found = seen("death", workers, tmp_path)
    assert len(found) == workers - 1
    for one in found.values():
        assert one["error"] and one["took"] < 10, one
        assert "still in MPI for an earlier attempt" in one["refused"] or one["refused"] == one["left"] == "", one
    assert any(not one["refused"] for one in found.values())


@pytest.mark.core(1)
@pytest.mark.slow
@only_on(1)
@needs_ulfm
@needs_interface
def test_a_lost_shard_comes_from_a_replica_of_it(tmp_path: Path) -> None:
    """FSDP2 trains on after two deaths: a spare takes the first one's place, then there is one replica less."""
    found = run("tests.mpi.torch.sharded", tmp_path, 4, 1)
    assert sorted(found) == [2, 3, 4]
    # The victims are ranks 1 and 2 of their groups. In the smaller groups of the mesh they are ranks 0 or 1.
    assert all(re.search("rank [012] ", said) for one in found.values() for said in one["errors"]), found
    assert found[2]["near"] and found[3]["near"]


@needs_interface
@only_on(2, 3)
def test_an_mpi_without_ulfm_says_so_at_the_start() -> None:
    """These tests' own mpirun has no ULFM."""
    said = heard(lambda: dist.init_process_group("mpips", enable_reconfigure=True))
    every = WORLD.allgather(said)
    assert all("enable_reconfigure=True needs an MPI in which a death ends no job" in each for each in every)
    assert not dist.is_initialized()
