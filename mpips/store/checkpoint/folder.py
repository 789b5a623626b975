"""The folder in which a store saves itself: a file a step, there whole or not at all, of which the newest two stay.

    FOLDER/store-00000100.safetensors

A file that is being written is named `store-*.part`. A Trainer's files have other names (`mpips.training.checkpoint`),
and count only where it is asked for the step that a job goes on from. Nothing here needs more than Python.
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
    """Return where a store is saved after a step."""
    return os.path.join(folder, f"store-{step:08d}.safetensors")


def steps_in(folder: str) -> dict[int, str]:
    """The paths of what stores have saved, by step, oldest first; nothing where there is no such folder."""
    return {step: path_of(folder, step) for step in _steps(folder, OURS)}


def newest_step(folder: str) -> int | None:
    """The step that a job goes on from, be it a store's or a Trainer's; None: it begins."""
    return max([*_steps(folder, OURS), *_steps(folder, TRAINERS)], default=None)


def prune(folder: str) -> None:
    """Remove all but the newest."""
    for path in list(steps_in(folder).values())[:-KEPT]:
        _remove(path)


def clear_parts(folder: str) -> None:
    """Remove what a kill has left unfinished, of older versions, too; not what another job is writing."""
    remove_abandoned(folder, OURS.pattern)
    with contextlib.suppress(OSError):
        for path in Path(folder).glob("store-*.safetensors.part"):
            _remove(path)


def make(folder: str) -> None:
    """Make the folder; ValueError where there cannot be one, or nothing can be written to it."""
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
