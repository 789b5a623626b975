"""The environment that `examples.reproduce.store.beside_mxnet` makes for MXNet, with a stand-in for venv and pip."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from examples.reproduce.store import beside_mxnet


def test_an_environment_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mxnet"
    interrupted = True

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        nonlocal interrupted
        if "venv" in command:
            python = Path(command[-1]) / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.touch()
        elif "pip" in command:
            if interrupted:
                interrupted = False
                raise KeyboardInterrupt
            Path(command[0]).with_name("mxnet").touch()
        else:
            whole = Path(command[0]).with_name("mxnet").exists()
            return subprocess.CompletedProcess(command, 0 if whole else 1, "", "no")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(beside_mxnet.subprocess, "run", run)
    monkeypatch.setattr(beside_mxnet.shutil, "which", lambda name: name)
    with pytest.raises(KeyboardInterrupt):
        beside_mxnet.environment(folder)
    python, reason = beside_mxnet.environment(folder)
    assert python == folder / "bin" / "python", reason
    assert [path.name for path in tmp_path.iterdir()] == ["mxnet"]


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "mine.txt"
    kept.touch()
    monkeypatch.setattr(beside_mxnet.shutil, "which", lambda name: name)
    python, reason = beside_mxnet.environment(tmp_path)
    assert python is None
    assert "--environment" in reason
    assert kept.exists()
