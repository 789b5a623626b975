"""Trace this rank: every call with its times, in a ring in a file beside its page, which outlives the process.

`mpips run --trace` asks for it by a variable, from the first call to the end. `mpips trace` asks at any time: it puts a
request into the job's folder and sends a signal. So a rank that is not traced does nothing for it, not even a look.

    head    JSON: who the rank is, and which clock it reads
    ring    `ring.Ring`
"""

from __future__ import annotations

import _thread
import atexit
import json
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from mpips.collectives import log
from mpips.collectives.recorder import folders, own, ring
from mpips.collectives.recorder.page import allocate, read
from mpips.collectives.recorder.ring import RECORD_BYTES, Record, Ring

VARIABLE = "_MPIPS_TRACE"
"""Set by `mpips run`: the bytes of each rank's ring."""
RING_BYTES, LEAST_BYTES = 32 << 20, 1 << 20
"""Of a rank's ring; and a half of it, and so on down to this, where all ranks' are more than half of what is free."""
SUFFIX, REQUEST = folders.TRACE, folders.TRACE_REQUEST
HEAD_BYTES = 4096
SIGNAL = int(signal.SIGRTMAX) - 7
"""A signal that nobody else uses, upon which a rank looks for a request."""
LOG = log.get("mpips.trace")
_begun = False


class RankTrace(NamedTuple):
    """Hold what one process has recorded. `who`: as its page says, with `pid`, `thread` (the main one) and `clock`.

    `overwritten`: older records that newer ones have replaced.
    """

    who: dict[str, Any]
    records: list[Record]
    overwritten: int

    @property
    def rank(self) -> int:
        """Return its rank in the job."""
        return int(self.who["rank"])


def begin(rank: int, size: int) -> None:
    """Open this rank's page, once for the process, and trace where the launcher has asked for it."""
    global _begun
    if _begun:
        return
    _begun = True
    try:
        own.begin(rank, size)
    except OSError as error:
        LOG.warning("no page of this rank, so that nobody sees it: %s: %s", folders.of_jobs(), error.strerror or error)
    log.begin_rank(size)
    path = own.beside(SUFFIX)
    if path is None:
        return
    with suppress(ValueError):  # the main thread alone may
        if signal.getsignal(SIGNAL) == signal.SIG_DFL:
            signal.signal(SIGNAL, _hear)
            signal.siginterrupt(SIGNAL, False)
    if asked := os.environ.get(VARIABLE):
        _start(path, int(asked))


def _hear(number: int, frame: FrameType | None) -> None:
    """Look for a request, in a thread: what the signal has interrupted may hold a lock."""
    _thread.start_new_thread(_trace_as_asked, ())


def _trace_as_asked() -> None:
    path = own.beside(SUFFIX)
    with suppress(OSError, ValueError, KeyError):
        if path is not None and not own.is_traced:
            request = json.loads((path.parent / REQUEST).read_text())
            if _start(path, request["bytes"]):
                time.sleep(max(0.0, (request["until_ns"] - time.monotonic_ns()) / 1e9))
                own.untrace()
                _describe(path)


def _start(path: Path, nbytes: int) -> bool:
    """Trace into a new file, or say why not."""
    with suppress(OSError):
        path.unlink()
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            mapped = mmap.mmap(fd, _allocate(fd, nbytes))
        finally:
            os.close(fd)
    except OSError as error:
        LOG.warning("no trace of this rank: %s: %s", path, error.strerror)
        with suppress(OSError):
            path.unlink()
        return False
    _describe(path)
    own.trace(Ring(memoryview(mapped)[HEAD_BYTES:]))
    atexit.register(_describe, path)  # by then it has its role
    return True


def _allocate(fd: int, nbytes: int) -> int:
    """Take memory for so many bytes, or for a half of them, and so on; return the file's length. OSError for none."""
    part = 2 * int(own.who()["size"])  # so many ranks may do the same at this moment, and leave MPI the other half
    while True:
        try:
            allocate(fd, 0, HEAD_BYTES + nbytes, part)
            return HEAD_BYTES + nbytes
        except OSError:
            os.ftruncate(fd, 0)
            nbytes //= 2
            if nbytes < LEAST_BYTES:
                raise


def _describe(path: Path) -> None:
    who = {**own.who(), "pid": os.getpid(), "thread": threading.main_thread().ident, "clock": clock()}
    raw = json.dumps(who).encode()[: HEAD_BYTES - 1]
    with suppress(OSError), open(path, "r+b") as file:
        file.write(raw.ljust(HEAD_BYTES, b"\0"))


def clock() -> str:
    """Return a name of the monotonic clock here, which all processes have that read the same one."""
    boot = offset = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with suppress(OSError):  # of a time namespace
        offset = ".".join(Path("/proc/self/timens_offsets").read_text().splitlines()[0].split()[1:])
    return f"{boot or socket.gethostname()}.{offset or '0.0'}"


def read_raw(folder: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield who each process of a job on this host is, and its ring, also of those that were killed."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(OSError, ValueError):
            with open(path, "rb") as file:
                who = json.loads(file.read(HEAD_BYTES).rstrip(b"\0"))
                data = file.read()
            with suppress(OSError):
                if (page := read(path.with_suffix(folders.PAGE))) is not None:
                    who = {**who, **page.identity}
            yield who, data


def parse(raw: Iterable[tuple[dict[str, Any], bytes]]) -> list[RankTrace]:
    """Return what processes have recorded, by rank."""
    found = []
    for who, data in raw:
        records = ring.read(data)
        last = records[-1].sequence if records else 0
        found.append(RankTrace(who, records, max(0, last - (len(data) - ring.HEAD_BYTES) // RECORD_BYTES)))
    return sorted(found, key=lambda one: (one.rank, one.who["pid"]))


def forget(folder: Path) -> None:
    """Remove what `read_raw` reads: it takes memory."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            path.unlink()
