"""List the files that belong to the project, and not other files that a developer has saved in the clone."""

from __future__ import annotations

import subprocess
from pathlib import Path


def tracked(folder: Path, pattern: str = "*.py") -> list[Path]:
    """Return the files below a folder that git tracks, sorted. Without git, as in an sdist, return all files."""
    if files := list_files(folder):
        return sorted(path for path in files if path.match(pattern) and path.is_file())
    return sorted(path for path in folder.rglob(pattern) if path.is_file())


def untracked(folder: Path) -> list[Path]:
    """Return the Python files below a folder that git neither tracks nor ignores."""
    return [path for path in list_files(folder, "--others", "--exclude-standard") if path.suffix == ".py"]


def list_files(folder: Path, *options: str) -> list[Path]:
    """Return the files that `git ls-files` lists. Empty without git, or if git refuses to read the folder."""
    git = ["git", "-C", str(folder), "ls-files", "-z", *options]
    try:
        listed = subprocess.run(git, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [folder / name for name in listed.split("\0") if name]
