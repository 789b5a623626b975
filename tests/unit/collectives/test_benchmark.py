"""Sizes as people write them, and data that shows a wrong result."""

from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest
from mpi4py import MPI

from collectives.benchmark import harness, report
from collectives.benchmark.__main__ import check
from collectives.benchmark.case import FLOOR_SHARE, IN_PLACE, contribution, count_wrong, expected
from collectives.call import Call, find_reduction
from collectives.schedule.model import KINDS
from collectives.terminal import parse_bytes, parse_sizes, show_bytes


@pytest.mark.parametrize(
    "text, nbytes", [("4096", 4096), ("4KiB", 4096), ("4 mib", 4 << 20), ("4MB", 4_000_000), ("2TiB", 2 << 40)]
)
def test_bytes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "KiB", "4XB", "-1", "4:2", "1:8:1", "1:8:2:3", "0:8"])
def test_bad_sizes_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=text or "size"):
        parse_sizes(text)


@pytest.mark.parametrize("text", ["1000000001GB", "9" * 400, "8:1000000001GB"])
def test_sizes_above_all_memory_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"above 1e\+18 bytes"):
        parse_sizes(text)


def test_ranges() -> None:
    assert parse_sizes("1KiB:64KiB") == [1024, 4096, 16384, 65536]
    assert parse_sizes("8:64:2") == [8, 16, 32, 64]
    assert parse_sizes("8,1MiB") == [8, 1 << 20]
    assert parse_sizes("8,1KiB:16KiB,1MB") == [8, 1024, 4096, 16384, 1_000_000]


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 1024, 4 << 20, 3 << 30, 5 << 40, 16_000_000, 548_000_000])
def test_shown_bytes_read_back(nbytes: int) -> None:
    assert parse_bytes(show_bytes(nbytes)) == nbytes


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32"])
@pytest.mark.parametrize("op", ["sum", "min", "max", "prod"])
def test_a_single_wrong_element_is_counted(dtype: str, op: str) -> None:
    n, p, bounds = 1000, 3, [0, 334, 667, 1000]
    wanted = expected("allreduce", op, 1, p, n, np.dtype(dtype), bounds)
    result = wanted.copy()
    assert count_wrong(result, wanted) == 0
    result[7] += 1
    assert count_wrong(result, wanted) == 1
    assert count_wrong(np.roll(wanted, 1), wanted) > n // 4


def test_blocks_of_every_kind_are_where_they_belong() -> None:
    n, p, bounds, dtype = 10, 3, [0, 4, 7, 10], np.dtype("int32")
    put_in = [contribution("sum", r, n, dtype, p) for r in range(p)]
    total = sum(put_in)
    np.testing.assert_array_equal(expected("reduce_scatter", "sum", 1, p, n, dtype, bounds), total[4:7])
    gathered = np.concatenate([put_in[0][:4], put_in[1][4:7], put_in[2][7:]])
    np.testing.assert_array_equal(expected("allgather", "sum", 1, p, n, dtype, bounds), gathered)
    exchanged = np.concatenate([x[7:] for x in put_in])
    np.testing.assert_array_equal(expected("alltoall", "sum", 2, p, n, dtype, bounds), exchanged)


@pytest.mark.parametrize("write", [report.write_rows, report.write_csv])
def test_rows_that_cannot_be_written_are_one_sentence(
    write: Callable[[list[report.Row], Path], None], full_disk: str
) -> None:
    row = report.Row("pt2pt", "blocking", "ordinary", "float32", "none", 2, 8, 2, 1.0, 1.0, 1.0, 1.0, 1.0, None, None)
    with pytest.raises(click.ClickException, match=f"^{full_disk} cannot be written: No space left on device$"):
        write([row], Path(full_disk))


WORDS = {
    "collective": "allreduce",
    "sizes": "8",
    "algorithms": "auto",
    "arrays": "empty",
    "dtype": "float32",
    "op": "sum",
}


def test_the_command_line_is_understood() -> None:
    wanted = check(4, **{**WORDS, "sizes": "8,1KiB", "algorithms": "ring,bcube(n=2,k=2)"})
    assert wanted.counts == [2, 256]
    assert wanted.algorithms == ["ring", "bcube(n=2,k=2)"]


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("sizes", "3", "--sizes 3: a float32 takes 4 bytes: pass multiples of that from 4 on, not 3 B"),
        ("sizes", "8,7", "from 4 on, not 7 B"),
        ("sizes", "1KiB,0", "from 4 on, not 0 B"),
        ("sizes", "many", "not a size"),
        ("dtype", "float31", "float31"),
        ("dtype", "object", "not a number type"),
        ("algorithms", "fast", "choose one of auto, shared_memory, native, one_shot, gloo, MPI, ring, "),
        ("algorithms", "ring(", "not written as"),
        ("algorithms", "bcube(n=3,k=2)", r"3\^2 ranks"),
        ("algorithms", "ring(over=messages)", "ring has no parameter 'over'"),
        ("algorithms", ",", "is empty"),
        ("sizes", "8,500000GB", "--sizes 8,500000GB takes at least 3 arrays of 500,000,000,000,000 bytes"),
        ("arrays", "mine", "ordinary, empty"),
        ("op", "mean of ints", "unknown operation"),
    ],
)
def test_what_cannot_be_is_refused(name: str, value: str, said: str) -> None:
    with pytest.raises(click.UsageError, match=said):
        check(4, **{**WORDS, name: value})


@pytest.mark.parametrize(
    "collective, name, choices",
    [
        ("alltoall", "ring", "auto, shared_memory, native, one_shot, MPI, direct"),
        ("iallreduce", "one_shot", "auto, shared_memory, native, ring, "),
        ("iallreduce", "gloo", "auto, shared_memory, native, ring, "),
    ],
)
def test_the_choices_are_those_that_serve(collective: str, name: str, choices: str) -> None:
    said = f"--algorithms {name}: '{name}' is not an algorithm for {collective}: choose one of {choices}"
    with pytest.raises(click.UsageError, match=said):
        check(4, **{**WORDS, "collective": collective, "algorithms": name})
    for choice in choices.rstrip(", ").split(", "):
        assert check(4, **{**WORDS, "collective": collective, "algorithms": choice}).algorithms == [choice]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_the_share_is_what_owners_read_and_write(kind: str, p: int) -> None:
    """Every owner reads its piece from the sources and writes it to the readers, except where it is there already."""
    n = 420
    call = Call(kind, n, np.dtype(np.float32), find_reduction("sum", np.dtype(np.float32)), 0, "auto", p)
    reads = writes = 0
    for owner in range(p):
        start, stop = call.block(owner)
        if kind == "alltoall":
            reads, writes = reads + n, writes + n
            continue
        reads += (stop - start) * len(call.sources(owner))
        there = call.sources(owner) if kind == "broadcast" and kind in IN_PLACE else []
        writes += (stop - start) * len([reader for reader in call.readers(owner) if reader not in there])
    assert FLOOR_SHARE[kind](p) == pytest.approx((reads + writes) / (2 * n * p))


class VirtualTime:
    """A clock that only sleep moves, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    made = VirtualTime()
    monkeypatch.setattr(harness, "time", made)
    return made


def test_every_call_has_a_batch_in_every_round(clock: VirtualTime) -> None:
    calls = [lambda: clock.sleep(1e-4), lambda: clock.sleep(0.5)]
    short, long = harness.measure(MPI.COMM_SELF, calls, 0.0, rounds=7)
    assert (len(short.rounds), len(long.rounds)) == (7, 7)
    assert (short.median, long.median) == pytest.approx((1e-4, 0.5))
    # 7 rounds of batches of 0.5 s for each call; before them warm calls, and batches that find the number of calls
    clock.now = 0.0
    harness.measure(MPI.COMM_SELF, calls, 7.0, rounds=7)
    assert clock.now == pytest.approx(7.0, abs=2.5)


def test_new_values_before_each_batch_take_no_time_of_it(clock: VirtualTime) -> None:
    renewed = []

    def renew() -> None:
        clock.sleep(1.0)
        renewed.append(clock.now)

    (timing,) = harness.measure(MPI.COMM_SELF, [lambda: clock.sleep(0.5)], 0.0, rounds=3, renew=renew)
    assert (len(renewed), timing.median) == (3, pytest.approx(0.5))


def test_a_rank_without_a_part_in_a_call_only_waits(clock: VirtualTime) -> None:
    assert harness.measure(MPI.COMM_SELF, [None], 0.0, rounds=2)[0].median == 0.0


def test_costs_are_those_of_the_calls(clock: VirtualTime) -> None:
    calls = {nbytes: lambda nbytes=nbytes: clock.sleep(1e-5 + 1e-9 * nbytes) for nbytes in (64, 1 << 12, 1 << 20)}
    assert harness.measure_costs(MPI.COMM_SELF, calls) == pytest.approx((1e-5, 1e-9), rel=1e-3)  # type: ignore[arg-type]
