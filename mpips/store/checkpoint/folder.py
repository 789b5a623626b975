"""The folder in which a store saves itself: one file for each save, whole or absent. The newest two stay.

    FOLDER/store-00000100.safetensors

While a file is being written it is named `store-*.part`. The files of a Trainer have other names
(`mpips.training.checkpoint`), and count only for `newest_step`. This module needs nothing but Python, because the
launcher uses it too.
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
    """Return step -> path of the stores' checkpoints in a folder, oldest first. Empty if the folder does not exist."""
    return {step: path_of(folder, step) for step in _steps(folder, OURS)}


def newest_step(folder: str) -> int | None:
    """Return the step from which a job goes on, from a checkpoint of a store or of a Trainer; None if there is none."""
    return max([*_steps(folder, OURS), *_steps(folder, TRAINERS)], default=None)


def prune(folder: str) -> None:
    """Remove all checkpoints of stores but the newest ones."""
    for path in list(steps_in(folder).values())[:-KEPT]:
        _remove(path)


def clear_parts(folder: str) -> None:
    """Remove unfinished files that a killed job has left, also those of older versions.

    Files that another job is writing stay.
    """
    remove_abandoned(folder, OURS.pattern)
    with contextlib.suppress(OSError):
        for path in Path(folder).glob("store-*.safetensors.part"):
            _remove(path)


def make(folder: str) -> None:
    """Make the folder. Raises ValueError if it cannot be made or written to."""
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
