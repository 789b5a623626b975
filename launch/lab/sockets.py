"""Where the labs of a user are found: a folder of this user's alone, with a lock and a socket for each lab that is up.

The keeper of a lab has its lock for as long as it lives, however it ends. What is found without such a holder is
removed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK, SOCKET = ".lock", ".socket"
LOOKS, LOOK_SECONDS = 20, 0.01  # at a lock that one may hold who only looks whether it is held


class LabError(RuntimeError):
    """A lab cannot be made, or there is none of that name."""


def names() -> list[str]:
    """Return the names of this user's labs."""
    with _folder() as folder:
        found = (name.removesuffix(LOCK) for name in os.listdir(folder) if name.endswith(LOCK))
        return sorted(name for name in found if not _is_left(folder, name))


def claim(name: str) -> tuple[socket.socket, int]:
    """Return a socket for the lab `name`, and a descriptor of its lock, to be open for as long as the lab is up.
    LabError where one of that name is."""
    with _folder() as folder:
        lock = _take_lock(folder, name)
        if lock is None:
            raise LabError(f"a lab named {name!r} is up already; `mpips lab down --name {name}` ends it")
        with suppress(FileNotFoundError):
            os.unlink(name + SOCKET, dir_fd=folder)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(_path(folder, name))
        return listener, lock


def connect(line: socket.socket, name: str) -> None:
    """Connect a socket to that of lab `name`. OSError where nobody listens."""
    with _folder() as folder:
        line.connect(_path(folder, name))


def _path(folder: int, name: str) -> str:
    """The path of a lab's socket in the open folder: that one, whatever others do to its name, and never too long."""
    return f"/proc/self/fd/{folder}/{name}{SOCKET}"


@contextmanager
def _folder() -> Iterator[int]:
    """Give a descriptor of this user's folder, made if need be: below /run for root, else, or where that cannot be,
    below /tmp. LabError where another user could be behind it."""
    user = os.geteuid()
    place = Path(f"/tmp/mpips-{user}")
    try:
        if user == 0 and os.access("/run", os.W_OK):
            place = Path("/run/mpips")
        with suppress(FileExistsError):
            place.mkdir(0o700)
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise LabError(f"labs are found in the folder {place}, which cannot be had ({error.strerror})") from None
    try:
        status = os.fstat(folder)
        if status.st_uid != user:
            raise LabError(f"{place} belongs to user {status.st_uid}, not to user {user}, whose labs it should hold: "
                           "let it be removed by its owner or by root")  # fmt: skip
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise LabError(f"{place} is open to other users, and holds what leads into labs: chmod 700 {place}")
        yield folder
    finally:
        os.close(folder)


def _take_lock(folder: int, name: str) -> int | None:
    """Return a descriptor that holds the lock of lab `name`; None where another does."""
    for _ in range(LOOKS):
        lock = os.open(name + LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
        if _holds(lock) and _is_file(lock, folder, name):
            return lock
        os.close(lock)
        time.sleep(LOOK_SECONDS)
    return None


def _is_left(folder: int, name: str) -> bool:
    """Whether nobody holds the lock of lab `name`: it and the socket are removed then."""
    try:
        lock = os.open(name + LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return True
    try:
        if not _holds(lock):
            return False
        if _is_file(lock, folder, name):
            for ending in (SOCKET, LOCK):
                with suppress(FileNotFoundError):
                    os.unlink(name + ending, dir_fd=folder)
        return True
    finally:
        os.close(lock)


def _holds(lock: int) -> bool:
    """Whether this descriptor has the lock, or gets it at once."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_file(lock: int, folder: int, name: str) -> bool:
    """Whether the open lock is what has the name, and no other has been made since."""
    try:
        return os.fstat(lock).st_ino == os.stat(name + LOCK, dir_fd=folder).st_ino
    except FileNotFoundError:
        return False
