"""The tuning table: kept, read back, left aside with a warning when spoilt; ranges from winners."""

import subprocess
import sys

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from collectives import CollectiveError
from collectives.call import Call, find_reduction
from collectives.schedule.catalog import check_algorithm
from collectives.schedule.model import KINDS
from collectives.simulator.simulate import predict_seconds
from collectives.tuner import table
from collectives.tuner.table import EVERYTHING, LinearCost, Range, Slots, TuningTable


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def call(algorithm, n=1000, p=4, kind="allreduce"):
    dtype = np.dtype(np.float32)
    return Call(kind, n, dtype, find_reduction("sum", dtype), 0, algorithm, p)


def test_shipped_until_kept():
    assert table.load(check_algorithm) == TuningTable()
    between = {"allreduce 2x4": (Range(EVERYTHING, "ring"),)}
    mine = TuningTable(slots={6: Slots(1, 2)}, cross_memory={6: 3}, between=between, near=LinearCost(1e-6, 1e-9))
    table.save(mine)
    assert table.load(check_algorithm) == mine


def of_allreduce(*ranges):
    """A table that has these (most, algorithm) for 4 ranks on 2 nodes."""
    entries = ",".join(f'{{"most": {most}, "algorithm": "{name}"}}' for most, name in ranges)
    return f'{{"between": {{"allreduce 2x4": [{entries}]}}}}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"slots": {"2": "much"}}',
        '{"slots": {"0": {"always": 1, "ordinary": 2}}}',
        '{"slots": {"2": {"always": -1, "ordinary": 2}}}',
        '{"slots": {"2": {"always": 3, "ordinary": 2}}}',
        '{"cross_memory": {"2": -5}}',
        '{"far": {"alpha": -1, "beta": 0}}',
        '{"gamma": -1}',
        '{"memory": {"slots many": {"alpha": 0, "beta": 0}}}',
        '{"between": {"nothing 2x4": []}}',
        of_allreduce(),
        of_allreduce((1000, "ring")),
        of_allreduce((EVERYTHING, "no such")),
        of_allreduce((EVERYTHING, "hierarchical(size=3)")),
        of_allreduce((EVERYTHING, "hierarchical(between=no)")),
        of_allreduce((EVERYTHING, "ring(")),
    ],
)
def test_a_spoilt_file_is_told(text):
    table.path().parent.mkdir(parents=True)
    table.path().write_text(text)
    with pytest.raises(CollectiveError, match="mpips tune"):
        table.load(check_algorithm)
    with pytest.warns(RuntimeWarning, match=f"cannot read {table.path()}: .*; using the shipped table") as told:
        assert table.load_or_warn(check_algorithm) == TuningTable()
    assert told[0].filename == __file__


def test_a_table_that_cannot_be_reached_is_told():
    table.path().mkdir(parents=True)
    with pytest.warns(RuntimeWarning, match="mpips tune"):
        assert table.load_or_warn(check_algorithm) == TuningTable()


def test_a_cache_that_is_no_folder_has_no_table(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert table.load(check_algorithm) == TuningTable()


@pytest.mark.parametrize("words, kept", [([], True), (["--dry-run"], False)])
def test_tune_makes_a_spoilt_table_anew(words, kept):
    tune = pytest.importorskip("collectives.tuner.tune")
    table.path().parent.mkdir(parents=True)
    table.path().write_text("{")
    done = CliRunner().invoke(tune.command, words)
    assert done.exit_code == 0, done.output
    assert f"{table.path()} is damaged" in done.output
    if kept:
        assert table.load(check_algorithm) == TuningTable()
    else:
        assert table.path().read_text() == "{"


@pytest.mark.parametrize("place", ["", "mpips", "mpips/collectives.json"])
def test_tune_sees_first_whether_the_table_can_be_kept(monkeypatch, tmp_path, place):
    tune = pytest.importorskip("collectives.tuner.tune")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    blocked = tmp_path / "cache" / place
    blocked.parent.mkdir(parents=True, exist_ok=True)
    if place.endswith("json"):
        blocked.mkdir()
    else:
        blocked.write_text("a file where a folder should be")
    with pytest.raises(click.ClickException, match="XDG_CACHE_HOME"):
        tune.check(2, dry_run=False)
    tune.check(2, dry_run=True)
    done = CliRunner().invoke(tune.command, [])
    assert done.exit_code == 1
    assert f"cannot write {table.path()}" in done.output
    assert "measured with" not in done.output


@given(st.integers(1, 300), st.integers(0, 1 << 40), st.sampled_from(KINDS), st.booleans())
def test_there_is_always_an_answer(ranks, nbytes, kind, crowded):
    limits = TuningTable().slot_limits(ranks, crowded)
    assert 0 < limits.always <= limits.ordinary
    assert TuningTable().cross_memory_from(ranks) > limits.ordinary
    assert TuningTable().best_between(kind, 2, ranks, nbytes)


def test_measured_limits_come_before_the_shipped():
    mine = TuningTable(slots={3: Slots(1, 2)})
    assert mine.slot_limits(3, True) == mine.slot_limits(3, False) == Slots(1, 2)
    assert mine.slot_limits(2, False) == TuningTable().slot_limits(2, False)
    mine = TuningTable(cross_memory={3: 5})
    assert mine.cross_memory_from(3) == 5
    assert mine.cross_memory_from(2) == TuningTable().cross_memory_from(2)


def test_measured_ranges_come_before_the_shipped():
    mine = TuningTable(between={"reduce 3x6": (Range(100, "binomial"), Range(EVERYTHING, "ring"))})
    assert mine.best_between("reduce", 3, 6, 100) == "binomial"
    assert mine.best_between("reduce", 3, 6, 101) == "ring"


def test_seconds_grow_with_bytes_and_know_the_closed_forms():
    mine = TuningTable(far=LinearCost(1e-5, 1e-9), gamma=0.0)
    ring = predict_seconds(mine, call("ring", n=1_000_000), nodes=4)
    assert ring == pytest.approx(6 * 1e-5 + 6 / 4 * 4e6 * 1e-9)
    assert predict_seconds(mine, call("native"), nodes=4) is None
    assert predict_seconds(mine, call("shared_memory", p=1), nodes=1, way="slots") == 0
    for way in ("slots", "stages", "cross_memory", "direct"):
        small, large = (predict_seconds(mine, call("shared_memory", n=n), 1, way) for n in (10**5, 10**7))
        assert small < large
    assert predict_seconds(mine, call("hierarchical", n=10**6), nodes=2) > 0


def test_ranges_join_equal_winners():
    tune = pytest.importorskip("collectives.tuner.tune")
    found = tune.ranges([(64, "a"), (256, "a"), (1024, "b"), (4096, "b")])
    assert found == (Range(512, "a"), Range(EVERYTHING, "b"))


@pytest.mark.parametrize(("lost", "last"), [([], 5), ([5], 4), ([2], 5), ([2, 3], 1), ([1, 2], 0), ([1, 3, 5], 4)])
def test_an_edge_is_the_last_size_that_wins_before_two_losses(lost, last):
    tune = pytest.importorskip("collectives.tuner.tune")
    assert tune.last_winning_size(range(1, 6), lambda size: size not in lost, 0) == last


def test_a_forced_table_has_one_way():
    tune = pytest.importorskip("collectives.tuner.tune")
    ways = tune.forced_tables(3)
    assert ways["slots"].slot_limits(3, True).ordinary == tune.SLOT_SIZES[-1]
    assert ways["stages"].slot_limits(3, True) == ways["cross_memory"].slot_limits(3, True) == Slots(0, 0)
    assert [ways[name].cross_memory_from(3) for name in ("stages", "cross_memory")] == [EVERYTHING, 0]


@pytest.mark.slow
def test_a_run_that_only_computes_loads_no_simulator():
    code = "import sys, numpy, collectives\ncollectives.allreduce(numpy.ones(3))\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180)
    loaded = [name for name in done.stdout.split() if name.startswith("mpips.collectives.")]
    assert "mpips.collectives.tuner.table" in loaded
    assert not [name for name in loaded if "simulator" in name or name.endswith("prediction")]
