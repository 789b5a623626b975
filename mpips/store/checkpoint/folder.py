"""The folder in which a store saves itself: one file for each save. Only the two newest files are kept.

    FOLDER/store-00000100.safetensors

A file of this name is always complete. While it is being written, its name is `store-*.part`. The files of a Trainer
have other names (`mpips.training.checkpoint`); only `newest_step` looks at them. This module needs nothing but Python,
because the launcher also uses it.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

from mpips.collectives.files import remove_abandoned

KEPT = 2
OURS = re.compile(r"store-(\d{8,})\.safetensors")
TRAINERS = re.compile(r"step-(\d{8,})\.trainer\.safetensors")


def path_of(folder: str, step: int) -> str:
    """Return the path of the checkpoint after a step."""
    return os.path.join(folder, f"store-{step:08d}.safetensors")


def steps_in(folder: str) -> dict[int, str]:
    """Return step -> path of each checkpoint of a store in the folder, oldest first.

    The result is empty if the folder does not exist.
    """
    return {step: path_of(folder, step) for step in _steps(folder, OURS)}


def newest_step(folder: str) -> int | None:
    """Return the step of the newest checkpoint of a store or a Trainer, or None if the folder has no checkpoint."""
    return max([*_steps(folder, OURS), *_steps(folder, TRAINERS)], default=None)


def prune(folder: str) -> None:
    """Remove all checkpoints of stores except the KEPT newest ones."""
    for path in list(steps_in(folder).values())[:-KEPT]:
        _remove(path)


def clear_parts(folder: str) -> None:
    """Remove unfinished files that a killed job of this or an older version of mpips has left.

    Files that another job is still writing are not removed.
    """
    remove_abandoned(folder, OURS.pattern)
    with contextlib.suppress(OSError):
        for path in Path(folder).glob("store-*.safetensors.part"):
            _remove(path)


def make(folder: str) -> None:
    """Make the folder if it does not exist. Raises ValueError if files cannot be written in it."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"checkpoint={folder!r}: nothing can be written to that folder: {error.strerror}") from error


def _steps(folder: str, names: re.Pattern[str]) -> list[int]:
    try:
        found = map(names.fullmatch, os.listdir(folder))
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match)


def _remove(path: str | Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
