"""A file that appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable


def put(path: str | os.PathLike[str], write: Callable[[str], object]) -> None:
    """Have `write` make a file beside `path`, then rename it. Blocking; raises what `write` raises, and OSError where
    the folder is not there, or the name is that of a device or a pipe, which stays as it is."""
    name = os.fspath(path)
    if os.path.exists(name) and not os.path.isfile(name):
        raise OSError(f"{name} is there and no regular file: choose another name")
    folder = os.path.dirname(name)
    if folder and not os.path.isdir(folder):
        raise OSError(f"there is no folder {folder}: make it first")
    unfinished = f"{name}.part"
    write(unfinished)
    os.replace(unfinished, name)
