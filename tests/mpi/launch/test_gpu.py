"""`make gpu` where there is no card: the sentence, stages that fail or hang, the programs on the host, the page."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from collectives.machine import usable_cores
from tests import child
from tests.gpu import __main__ as command
from tests.gpu import bandwidth, stages, tensor
from tests.mpi.sizes import only_on

pytestmark = only_on(1)
QUIET = {"say": lambda text: None}


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a card")
def test_no_card_is_said_and_is_no_failure(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(argv, cwd=child.ROOT, env=child.outside(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("mpips: no GPU was checked, as there is no card here: ")
    assert done.stdout.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_stage_that_fails_or_hangs_is_reported_and_others_go_on(tmp_path: Path) -> None:
    given = tmp_path / "rows.json"
    given.write_text(json.dumps([{"share": 0.95, "ok": True}, {"share": 0.5, "ok": False}, {"share": 0.9, "wrong": 3}]))
    every = [
        stages.program("leaves", "", 1, 90, "timeit", "-n1", "-r1", "raise ValueError"),
        stages.program("hangs", "", 1, 3, "timeit", "-n1", "-r1", "import time; time.sleep(60)"),
        stages.unit("has no tests", 90, "tests/unit/test_choice.py"),
        stages.program("is slow", "Shares", 1, 90, "json.tool", str(given), "ROWS"),
        stages.program("has no time", "", 1, 90, "json.tool", str(given), "ROWS")._replace(limit=0),
    ]
    records = list(stages.check(every, 170, **QUIET))
    assert [record["failures"] for record in records] == [
        ("exit code 1",),
        ("ended, as it was not done after 3 s",),
        ("nothing has run",),
        ("not as asked: share 0.5, ok False", "not as asked: share 0.9, wrong 3"),
        ("no time was left for it",),
    ]
    assert [record["passed"] for record in records] == [0, 0, 0, 1, 0]
    found = stages.report(stages.surroundings() | {"card": {"name": "A card"}}, records, 4.0)
    assert not found["ok"]
    assert json.loads(json.dumps(found))["stages"][3]["rows"][0] == {"share": 0.95, "ok": True}
    page = stages.page(found)
    assert page.startswith("# mpips on A card\n\n**Some checks failed.**")
    assert "- hangs: ended, as it was not done after 3 s" in page
    assert "| 0.95 | True |" in page


def test_a_kernel_must_move_nine_tenths_of_a_copy() -> None:
    rows = [bandwidth.row("on the card", "float32", 3, ms, 1.0, 4 << 20, 2 << 20, bandwidth.ASKED) for ms in (2.2, 2.3)]
    assert [round(row["share"], 3) for row in rows] == [0.909, 0.87]
    assert [row["ok"] for row in rows] == [True, False]


@pytest.mark.slow
@pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
def test_the_programs_run_on_the_host() -> None:
    words = "tests.gpu.tensor", "ROWS", "--arrays", "numpy", "--sizes", "4KiB,64KiB", "--seconds", "0.05"
    every = [stages.program("tensor", stages.TENSOR, 2, 60, *words), *stages.on_the_cores((2, 4096), "1KiB", 0.02)]
    records = list(stages.check(every, 150, **QUIET))
    stages.beside_mpi(records)
    assert [record["failures"] for record in records if record["failed"]] == []
    rows = {record["table"]: record["rows"] for record in records}
    assert [row["way"] for row in rows[stages.TENSOR]] == 2 * [tensor.BY_HAND, *tensor.WAYS]
    page = stages.page(stages.report(stages.surroundings() | {"card": {"name": "A card"}}, records, 4.0))
    assert "All checks passed." in page
    assert all(f"## {title}" in page for title in (stages.TENSOR, stages.ALLREDUCE, stages.STORE))
    assert all(row["MPI_allreduce_s"] > 0 for row in rows[stages.STORE])


@pytest.mark.slow
def test_a_python_that_lacks_packages_gets_them_from_carried_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "NEEDED", ("numpy", "carried", "absent"))
    wheels, folder, python = tmp_path / "wheels", tmp_path / "environment", sys.executable
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as file:
        file.writestr("carried.py", "")
        file.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        file.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr("carried-1.0.dist-info/RECORD", "")
    with pytest.raises(SystemExit, match="lacks absent: carry"):
        command.environment(python, wheels, folder)
    monkeypatch.setattr(command, "NEEDED", ("numpy", "mpi4py", "carried"))
    assert command.environment(python, wheels, folder) == str(folder / "bin" / "python")
    assert "carried" in command.lacking(python)


@pytest.mark.slow
def test_every_stage_of_tests_has_tests_that_need_a_card() -> None:
    places = (stages.KERNELS, stages.TENSORS, stages.STREAMS, stages.ARRAYS, stages.DEVICES)
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *places]
    done = subprocess.run(argv, cwd=child.ROOT, env=child.outside(), capture_output=True, text=True, timeout=120)
    assert [place for place in places if f"{place}::" not in done.stdout] == [], done.stdout[-500:]
