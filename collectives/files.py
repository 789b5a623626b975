"""A file that is there whole or not at all, whatever ends the program, and that goes through no link of others.

It is made beside its place, as `NAME.RANDOM.part`, and renamed. Who makes one holds a lock on it: what a kill has left
has none, and the next file of the same name removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import stat
import time
from typing import Any

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
LONGEST = 220
"""Bytes of a file's name that the unfinished file's name repeats: file systems allow 255."""
ABANDONED_SECONDS = 2.0
"""An unfinished file without a lock that is as old has been left by a kill: its maker would have locked it by now."""
STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
"""Names of standard output and its like, which are written in place."""
NO_NEW_FILE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors of a folder that takes no new file, though a file that is there may be written."""


class NewFile:
    """A file that is being made: write to `fd`, and `finish` puts it at `path`; `abandon` leaves what is there.

    It has the mode of the user's own file that it replaces, else that of the umask. A link at `path` is replaced, not
    followed. Raises OSError where no such file can be made: `path` is a folder, a device or a pipe, or its folder is
    not there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        folder, name = os.path.split(self.path)
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise OSError("it is there and no regular file: choose another name")
        _see_folder(folder)
        self._folder, start = folder or ".", os.fsdecode(os.fsencode(name)[:LONGEST])
        remove_abandoned(self._folder, re.escape(start), ABANDONED_SECONDS)
        mode, self._ended = _mode_of(self.path), False
        self._unfinished, self.fd = _made(os.path.join(self._folder, start), 0o666 if mode is None else mode)
        with contextlib.suppress(OSError):  # a file system without locks keeps what a kill leaves
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if mode is not None:
            os.fchmod(self.fd, mode)

    def finish(self) -> None:
        """Put the file in place, where it stays whatever happens to the machine. Blocks until the disk has it. OSError
        where it cannot be there: what was at its place still is."""
        self._ended = True
        try:
            os.fsync(self.fd)
            os.replace(self._unfinished, self.path)
        except OSError:
            self._remove()
            raise
        finally:
            os.close(self.fd)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abandon(self) -> None:
        """Leave what was at `path` as it was. Once `finish` has begun: nothing."""
        if not self._ended:
            self._ended = True
            self._remove()
            os.close(self.fd)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._unfinished)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file as a whole; OSError where it cannot be. Blocking.

    Devices, pipes and standard output are written as they are, and so is a file in a folder that takes no new one.
    """
    name = os.fspath(path)
    if name.startswith(STREAMS) or (os.path.exists(name) and not os.path.isfile(name)):
        _write_in_place(name, data, 0)
        return
    try:
        file = NewFile(name)
        try:
            write_all(file.fd, data)
            file.finish()
        finally:
            file.abandon()
    except OSError as error:
        if error.errno not in NO_NEW_FILE or os.path.islink(name) or not os.path.isfile(name):
            raise
        _write_in_place(name, data, os.O_NOFOLLOW)


def write_picture(path: str | os.PathLike[str], figure: Any, dpi: float | str = "figure") -> None:
    """Draw a figure of matplotlib into a file, in the format that its name ends in. Blocking; OSError as in `write`."""
    name = os.fspath(path)
    if not (ending := os.path.splitext(name)[1]):
        name, ending = f"{name}.png", ".png"
    drawn = io.BytesIO()
    figure.savefig(drawn, format=ending[1:].lower(), dpi=dpi)
    write(name, drawn.getvalue())


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes at the place where a file stands. Blocking; OSError where the disk does not take them."""
    left = memoryview(data)
    while len(left):
        left = left[os.write(fd, left) :]


def _write_in_place(name: str, data: bytes, flags: int) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | flags)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def _made(start: str, mode: int) -> tuple[str, int]:
    """Return a file of a new name that nobody can guess, and its descriptor."""
    while True:
        name = f"{start}.{secrets.token_hex(8)}.part"
        with contextlib.suppress(FileExistsError):
            return name, os.open(name, NEW, mode)


def _mode_of(path: str) -> int | None:
    """Return the mode of the user's own file; None where there is none, or it is another user's."""
    try:
        there = os.lstat(path)
    except OSError:
        return None
    return stat.S_IMODE(there.st_mode) & 0o777 if stat.S_ISREG(there.st_mode) and there.st_uid == os.geteuid() else None


def _see_folder(folder: str) -> None:
    """OSError where it is not there, which says why."""
    above = folder
    while above and not os.path.lexists(above):
        above = os.path.dirname(above)
    if above and not os.path.isdir(above):
        raise OSError(f"{above} is no folder: choose another place")
    if above != folder:
        raise OSError(f"there is no folder {folder}: make it first")


def remove_abandoned(folder: str, names: str, seconds: float = 0.0) -> None:
    """Remove what kills have left of the user's files whose names match, at least so long ago. What somebody is still
    writing stays."""
    unfinished = re.compile(rf"(?:{names})\.[0-9a-f]{{16}}\.part")
    with contextlib.suppress(OSError):
        for name in filter(unfinished.fullmatch, os.listdir(folder)):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    there = os.fstat(fd)
                    if there.st_uid == os.geteuid() and time.time() - there.st_mtime >= seconds:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it is being written
                        os.unlink(path)
                finally:
                    os.close(fd)
