"""The files of the project, without what somebody has saved beside them: a program of README's, notes, a new module."""

from __future__ import annotations

import subprocess
from pathlib import Path


def tracked(folder: Path, pattern: str = "*.py") -> list[Path]:
    """Files below a folder that git tracks, in order; all of them where git tracks none, as in an sdist."""
    if known := list_files(folder):
        return sorted(path for path in known if path.match(pattern) and path.is_file())
    return sorted(path for path in folder.rglob(pattern) if path.is_file())


def untracked(folder: Path) -> list[Path]:
    """Python files below a folder that git neither tracks nor ignores."""
    return [path for path in list_files(folder, "--others", "--exclude-standard") if path.suffix == ".py"]


def list_files(folder: Path, *words: str) -> list[Path]:
    """What `git ls-files` lists. Empty without git, outside a repository, and in one of another user."""
    git = ["git", "-C", str(folder), "ls-files", "-z", *words]
    try:
        listed = subprocess.run(git, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [folder / name for name in listed.split("\0") if name]
