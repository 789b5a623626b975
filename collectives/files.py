"""Writes a file completely or not at all, however the program ends. A symbolic link at its path is replaced.

A new file is written as `NAME.RANDOM.part` in the same folder, and renamed at the end. The process that writes it holds
a lock on it. So an unfinished file without a lock was left by a killed process; the next write of a file of the same
name removes it.
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
# An unfinished file's name begins with at most this many bytes of the final name. File systems allow 255 bytes.
LONGEST = 220
# An unfinished file without a lock counts as abandoned from this age on. The writer of a younger file may not have
# locked it yet.
ABANDONED_SECONDS = 2.0
# Paths that begin like this, such as that of standard output, are written in place.
STREAMS = ("/dev/std", "/dev/fd/", "/proc/")
# errors of a folder that accepts no new files, although an existing file in it may be writable
NO_NEW_FILE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


class NewFile:
    """A file that is being written. Write to `fd`; then `finish` puts it at `path`, or `abandon` discards it.

    If the new file replaces a file of the same user, it gets the mode of the old file. Otherwise the umask decides its
    mode. A symbolic link at `path` is replaced, not followed. Raises OSError if the file cannot be made, for example
    because `path` is a folder, a device or a pipe, or because its folder does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        folder, name = os.path.split(self.path)
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise OSError("it exists and is not a regular file: choose another name")
        _check_folder(folder)
        self._folder, start = folder or ".", os.fsdecode(os.fsencode(name)[:LONGEST])
        remove_abandoned(self._folder, re.escape(start), ABANDONED_SECONDS)
        mode = _existing_mode(self.path)
        # True once `finish` or `abandon` has begun
        self._ended = False
        self._unfinished, self.fd = _make_unfinished(os.path.join(self._folder, start), 0o666 if mode is None else mode)
        # Not all file systems have locks. Without them the unfinished files of killed processes stay.
        with contextlib.suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if mode is not None:
            os.fchmod(self.fd, mode)

    def finish(self) -> None:
        """Put the file at `path`. Blocks until the file is on the disk, so that it survives a crash of the machine.

        If this raises OSError before the file is renamed, the file that was at `path` is unchanged.
        """
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
        """Discard the file and leave `path` as it was. Does nothing once `finish` has begun."""
        if not self._ended:
            self._ended = True
            self._remove()
            os.close(self.fd)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._unfinished)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file completely or not at all. Blocking. Raises OSError if that fails.

    Devices, pipes and standard output are written in place, and so is a file in a folder that accepts no new files.
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
    """Draw a matplotlib figure and `write` it to a file. The suffix of the file name sets the format (default PNG)."""
    name = os.fspath(path)
    if not (ending := os.path.splitext(name)[1]):
        name, ending = f"{name}.png", ".png"
    drawn = io.BytesIO()
    figure.savefig(drawn, format=ending[1:].lower(), dpi=dpi)
    write(name, drawn.getvalue())


def write_all(fd: int, data: bytes) -> None:
    """Write all bytes at the current position of an open file. Blocking. Raises OSError."""
    left = memoryview(data)
    while len(left):
        left = left[os.write(fd, left) :]


def _write_in_place(name: str, data: bytes, flags: int) -> None:
    fd = os.open(name, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | flags)
    try:
        write_all(fd, data)
    finally:
        os.close(fd)


def _make_unfinished(start: str, mode: int) -> tuple[str, int]:
    """Make a file whose name begins with `start` and cannot be guessed. Return its name and descriptor."""
    while True:
        name = f"{start}.{secrets.token_hex(8)}.part"
        with contextlib.suppress(FileExistsError):
            return name, os.open(name, NEW, mode)


def _existing_mode(path: str) -> int | None:
    """Return the mode of a regular file of this user, or None if there is no such file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return stat.S_IMODE(status.st_mode) & 0o777 if own else None


def _check_folder(folder: str) -> None:
    """Raise OSError, with the reason, if a folder does not exist."""
    above = folder
    while above and not os.path.lexists(above):
        above = os.path.dirname(above)
    if above and not os.path.isdir(above):
        raise OSError(f"{above} is not a folder: choose another place")
    if above != folder:
        raise OSError(f"there is no folder {folder}: make it first")


def remove_abandoned(folder: str, names: str, seconds: float = 0.0) -> None:
    """Remove unfinished files of this user that killed processes have left. Files that are still being written stay.

    Args:
        names: A regular expression for the final names of the unfinished files.
        seconds: Only files of at least this age are removed.
    """
    unfinished = re.compile(rf"(?:{names})\.[0-9a-f]{{16}}\.part")
    with contextlib.suppress(OSError):
        for name in filter(unfinished.fullmatch, os.listdir(folder)):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    status = os.fstat(fd)
                    if status.st_uid == os.geteuid() and time.time() - status.st_mtime >= seconds:
                        # Raises BlockingIOError, an OSError, if the file is still being written.
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(path)
                finally:
                    os.close(fd)
