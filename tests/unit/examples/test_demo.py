"""The demo starts what a user would start, passes on what a job reports, and says why a job failed."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("matplotlib", reason="the demo draws with matplotlib")
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from matplotlib.figure import Figure

import demo
import picture
import task

OPTIONS = argparse.Namespace(workers=4, servers=2, clients=2, epochs=3, batch_size=16, limit=20)
REPORT = 'print(\'{"mode": "x", "epoch": 1, "seconds": 0.5, "loss": 0.1, "test_accuracy": 0.97}\')'


def test_every_mode_has_its_script_and_roles():
    words = {mode.name: " ".join(demo.command(mode, OPTIONS)[1:]) for mode in demo.MODES}
    assert all((demo.HERE / mode.script).is_file() for mode in demo.MODES)
    assert "--servers 2 --clients 2" in words["mpi-ESGD"]
    assert "esgd.py" in words["mpi-ESGD"] and words["mpi-ESGD"].endswith("--kind mpi_async")
    assert "/sgd.py" in words["dist-SGD"] and words["dist-SGD"].endswith("--kind dist_sync")
    assert not any("--kind" in words[name] for name in ("serial", "pure MPI"))
    assert "--servers 2" in words["dist-SGD"]
    assert "--clients" not in words["dist-SGD"]
    assert "--servers 0" in words["pure MPI"]
    assert "run" not in words["serial"].split()
    assert "--batch-size 64" in words["serial"]
    assert all("--batch-size 16" in text for name, text in words.items() if name != "serial")


@pytest.mark.slow
def test_the_demo_knows_how_many_images_there_are():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    assert len(task.digits("float32")[0]) == demo.IMAGES


def test_a_jobs_reports_come_and_other_output_does_not():
    records = list(demo.epochs([sys.executable, "-c", f"print('hello'); {REPORT}"], 20))
    assert [record["test_accuracy"] for record in records] == [0.97]


def test_a_failing_job_is_an_error_that_holds_what_it_said():
    with pytest.raises(demo.JobError, match="no such colour"):
        list(demo.epochs([sys.executable, "-c", f"{REPORT}; raise ValueError('no such colour')"], 20))


def test_a_job_that_takes_too_long_is_ended():
    with pytest.raises(demo.JobError, match=r"did not end within 0\.2 seconds"):
        list(demo.epochs([sys.executable, "-c", "import time; time.sleep(60)"], 0.2))


@pytest.mark.slow
def test_the_summary_and_the_picture_have_every_mode(tmp_path):
    records = [{"seconds": 0.1 * i, "loss": 1 / i, "test_accuracy": 0.9 + 0.02 * i} for i in (1, 2, 3)]
    results = [demo.summary(mode, records, OPTIONS, wall=2.0) for mode in demo.MODES]
    assert [result["mode"] for result in results] == [mode.name for mode in demo.MODES]
    assert all(result["passed"] and result["curve"][-1] == pytest.approx([0.3, 0.96]) for result in results)
    picture.draw(results, 0.95, "a title", tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_table_and_picture_say_what_the_serial_run_is(tmp_path, monkeypatch):
    said = "serial: one process alone, with the mini-batch of all workers"
    screen = Console(record=True, file=io.StringIO())
    screen.print(demo.Board(OPTIONS))
    assert said in " ".join(screen.export_text().split())
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    results = [demo.summary(demo.MODES[0], [{"seconds": 1, "loss": 1, "test_accuracy": 0.9}], OPTIONS, wall=2.0)]
    picture.draw(results, 0.95, "a title", tmp_path / "demo.png")
    assert any(said in text.get_text().replace("\n", " ") for text in figures[0].axes[0].texts)


@pytest.mark.parametrize(
    "raised, code, said",
    [
        (KeyboardInterrupt(), 130, "demo: interrupted"),
        (demo.Terminated(), 143, "demo: interrupted"),
        (demo.JobError("a job ended with code 3"), 1, "demo: a job ended"),
    ],
)
def test_ctrl_c_and_a_failed_job_end_the_demo_with_a_sentence(raised, code, said, monkeypatch, tmp_path, capsys):
    def fails(argv, limit):
        raise raised

    monkeypatch.setattr(demo, "epochs", fails)
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path)])
    assert demo.main() == code
    assert said in capsys.readouterr().err


def test_sigterm_ends_the_job_that_runs(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    job = f"import os, time\nwith open({str(pipe)!r}, 'w') as file: file.write(str(os.getpid()))\ntime.sleep(100)"
    code = f"import sys, demo\ndemo.command = lambda *_: [sys.executable, '-c', {job!r}]\nsys.exit(demo.main())"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(demo.HERE), str(demo.HERE.parent)])}
    process = subprocess.Popen([sys.executable, "-c", code, "--out", str(tmp_path)], env=environment)
    pid = int(pipe.read_text())
    process.terminate()
    assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("lost, kept", [demo.FILES, demo.FILES[::-1]])
def test_of_two_files_the_one_that_can_be_written_is(lost, kept, full_disk, monkeypatch, tmp_path, capsys):
    records = [{"seconds": 0.1 * i, "loss": 1 / i, "test_accuracy": 0.97} for i in (1, 2)]
    (tmp_path / lost).symlink_to(full_disk)
    monkeypatch.setattr(demo, "epochs", lambda argv, limit: records)
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path)])
    assert demo.main() == 1
    said = capsys.readouterr()
    assert said.err == f"demo: {tmp_path / lost} cannot be written: No space left on device\n"
    assert (tmp_path / kept).stat().st_size
    assert f"{tmp_path / kept} is written." in " ".join(said.out.split())


def test_without_matplotlib_there_is_no_picture_but_all_else(monkeypatch, tmp_path, capsys):
    records = [{"seconds": 0.1, "loss": 1.0, "test_accuracy": 0.97}]
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(demo, "epochs", lambda argv, limit: records)
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path)])
    assert demo.main() == 1
    said = capsys.readouterr()
    assert said.err == f"demo: {tmp_path}/demo.png is drawn by matplotlib, which is missing: {demo.PLOT}\n"
    assert "mpi-ESGD" in said.out
    assert os.listdir(tmp_path) == ["demo.json"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--epochs 0", "'0' is not a whole number of at least 1"),
        ("--workers 0", "at least 1"),
        ("--servers x", "'x' is no"),
        ("--limit nan", "'nan' is not a number"),
        ("--clients 9 --workers 4", "9 clients need as many workers, not 4"),
        ("--out FILE", "results cannot be written there"),
        (
            "--workers 90",
            "--workers 90 with --batch-size 16 take 1,440 images a step, and there are 1,437: ask for fewer",
        ),
        ("--servers 1000000000", "1000000004 ranks cannot start on this machine"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_starts(words, said, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit):
        demo.read(words.replace("FILE", str(file)).split())
    assert said in capsys.readouterr().err
