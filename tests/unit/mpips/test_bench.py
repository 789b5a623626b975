"""The store's benchmark refuses what cannot be before any rank starts, and wrong sums when they come."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

from collectives.kernels import engine
from examples.reproduce.overlap.measured import RATE, OverlapJob
from mpips.bench.kvstore import check, expected_values, measure_rounds
from mpips.bench.optimizers import command
from mpips.optimizers import SGD

WORDS = {
    "kind": "dist_sync",
    "servers": 1,
    "clients": 1,
    "masters": "one",
    "keys": 1,
    "arrays": "empty",
    "optimizer": None,
    "momentum": 0.0,
}


def test_more_than_memory_holds_is_refused() -> None:
    assert check(2, sizes="1024", **WORDS).counts == [256]
    with pytest.raises(click.UsageError, match="--sizes 500000GB takes at least 2 arrays of 500,000,000,000,000 bytes"):
        check(2, sizes="500000GB", **WORDS)
    with pytest.raises(click.UsageError, match="--sizes 1GB --keys 500000 takes at least 2 arrays of"):
        check(2, sizes="1GB", **{**WORDS, "keys": 500_000})


@pytest.mark.parametrize("kind", ["dist_async", "mpi_async", "Asynchronous-MPI"])
def test_an_asynchronous_store_without_servers_is_refused(kind: str) -> None:
    with pytest.raises(click.UsageError, match=r"a store of kind \w+_async needs a server \(servers=0\)"):
        check(2, **{**WORDS, "kind": kind, "servers": 0}, sizes="1024")


def test_variables_that_do_not_fit_the_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPS_WORKERS", "7")
    with pytest.raises(click.UsageError, match="workers=7 and servers=1 need 8 ranks, but the job has 3"):
        check(3, **WORDS, sizes="1024")


def test_clients_of_a_store_that_has_none_are_refused() -> None:
    with pytest.raises(click.UsageError, match=r"--clients 2 is for mpi_\* stores: in dist_sync every worker is"):
        check(4, **{**WORDS, "clients": 2}, sizes="1024")
    assert check(4, **{**WORDS, "kind": "mpi_sync", "clients": 2}, sizes="1024").kind == "mpi_sync"


@pytest.mark.parametrize(
    "sizes, said",
    [
        ("7", "--sizes 7: a float32 takes 4 bytes: pass multiples of that from 4 on, not 7 B"),
        ("1KiB,0", "from 4 on, not 0 B"),
        ("8,8", "each size once"),
    ],
)
def test_sizes_are_whole_elements_each_once(sizes: str, said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        check(2, **WORDS, sizes=sizes)


class LastRound:
    """A store of one worker, which pulls what was pushed `late` rounds ago."""

    type, rank, num_workers = "dist_sync", 0, 1
    layout = SimpleNamespace(workers=SimpleNamespace(Bcast=lambda array: None))

    def __init__(self, late: int) -> None:
        self.pushed = [np.zeros(100, np.float32)] * (late + 1)

    def push(self, key: str, value: np.ndarray) -> None:
        self.pushed = [*self.pushed[1:], value.copy()]

    def pull(self, key: str, out: np.ndarray) -> None:
        out[:] = self.pushed[0]

    def pushpull(self, key: str, value: np.ndarray, out: np.ndarray) -> None:
        self.push(key, value)
        self.pull(key, out)

    def barrier(self) -> None: ...


def test_a_pull_of_an_earlier_round_is_no_result() -> None:
    kv: Any = LastRound(0)
    assert measure_rounds(kv, 100, "ordinary", 1, 0.0, expected_values(None))[0] == 5
    kv = LastRound(1)
    with pytest.raises(RuntimeError, match="dist_sync, round 1: of 400 bytes, an element came back as 0, not 1"):
        measure_rounds(kv, 100, "ordinary", 1, 0.0, expected_values(None))


def test_an_update_that_is_missing_is_no_result() -> None:
    kv: Any = LastRound(0)
    with pytest.raises(RuntimeError, match=r"dist_sync, round 1: of 400 bytes, an element came back as 1, not -0\.01"):
        measure_rounds(kv, 100, "ordinary", 1, 0.0, expected_values(SGD()))


def test_momentum_of_another_optimizer_is_refused() -> None:
    assert check(2, **{**WORDS, "optimizer": "sgd", "momentum": 0.9}, sizes="8").optimizer == SGD(momentum=0.9)
    with pytest.raises(click.UsageError, match="--momentum is for --optimizer sgd, not for adam"):
        check(2, **{**WORDS, "optimizer": "adam", "momentum": 0.9}, sizes="8")


def test_an_iteration_whose_parameters_are_those_before_it_is_no_result() -> None:
    job: Any = OverlapJob.__new__(OverlapJob)  # without a store
    job.kv = SimpleNamespace(rank=0, num_workers=2)
    job.hold([60, 140])
    for number in range(1, 4):
        job.change(number)
        assert set(job.gradients[::3]) == {number}
        job.parameters -= np.float32(RATE * (2 * number + 1))  # of both workers
        job.see("merged", number)
    job.see("other keys", 1)
    with pytest.raises(RuntimeError, match=r"merged, iteration 4: a parameter moved by 0, not by 0\.009"):
        job.see("merged", 4)


def test_without_pytorch_it_says_so_and_measures_the_rest(monkeypatch, tmp_path):
    compiled = engine.status().engine == "numba"
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "optimizers.json"
    result = CliRunner().invoke(command, ["--elements", "1000", "--repeats", "1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "PyTorch is left out" in result.output
    cases = json.loads(path.read_text())
    assert {(name, gradients) for name in ("SGD momentum", "Adam") for gradients in (1, 2, 4, 8)} <= {
        (case["optimizer"], case["gradients"]) for case in cases
    }
    assert all(case["elements"] == 1000 and case["numpy_ms"] > 0 and case["ratio"] is None for case in cases)
    assert [case["optimizer"] for case in cases if (case["compiled_ms"] is None) == compiled] == []


def test_cases_that_cannot_be_written_are_one_sentence(full_disk):
    result = CliRunner().invoke(command, ["--elements", "1000", "--repeats", "1", "--json", full_disk])
    assert result.exit_code == 1
    assert result.output.endswith(f"Error: --json {full_disk} cannot be written: No space left on device\n")


def test_more_elements_than_memory_holds_are_refused():
    result = CliRunner().invoke(command, ["--elements", "100000000000000"])
    assert result.exit_code == 2
    assert "--elements 100000000000000 takes at least 22 arrays of 400,000,000,000,000 bytes" in result.output
