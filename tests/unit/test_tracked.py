"""The checkers look at the project's files, not at what somebody tries out in the clone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests import run
from tests.tracked import tracked, untracked


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    if not shutil.which("git"):
        pytest.skip("no git is installed")
    for name in ("ours.py", "deep/ours.py", "README.md", "train.py", "notes.md", "ignored.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("import os, sys\n")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    for words in (["init", "-q"], ["add", "ours.py", "deep", "README.md"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=60)
    return tmp_path


def test_a_program_saved_in_the_clone_is_not_looked_at(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracked(clone) == [clone / "deep/ours.py", clone / "ours.py"]
    assert tracked(clone, "*.md") == [clone / "README.md"]
    assert untracked(clone) == [clone / "train.py"]
    monkeypatch.setattr(run, "ROOT", clone)
    done = subprocess.run(run.ruff("check"), cwd=clone, capture_output=True, text=True, timeout=60, check=False)
    assert "ours.py" in done.stdout and "train.py" not in done.stdout


def test_without_git_all_files_are_ours(clone: Path) -> None:
    shutil.rmtree(clone / ".git")
    assert clone / "train.py" in tracked(clone) and not untracked(clone)
