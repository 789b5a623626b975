"""Traces this rank: records every call with its times in a file beside the rank's page. The file outlives the process.

A page is the file in which a rank always records what it does (`recorder.page`). `mpips run --trace` sets an
environment variable to ask for a trace of the whole job. `mpips trace` can ask at any time: it puts a request into the
job's folder and sends a signal. So tracing costs a rank nothing before a request: the rank need not even check for
requests.

Layout of the file:

    head    JSON: the identity of the rank, and the name of the clock that its times come from
    ring    `ring.RecordRing`
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
from mpips.collectives.recorder.ring import RECORD_BYTES, CallRecord, RecordRing

# environment variable with the size of each rank's ring in bytes, set by `mpips run`
VARIABLE = "_MPIPS_TRACE"
# The size of a rank's ring of records. If the rings of all ranks need more than half of the free memory, this size is
# halved repeatedly, but not below LEAST_BYTES.
RING_BYTES = 32 << 20
LEAST_BYTES = 1 << 20
SUFFIX = folders.TRACE
REQUEST = folders.TRACE_REQUEST
HEAD_BYTES = 4096
# a signal that no other library uses; a rank that gets it looks for a request in the job's folder
SIGNAL = int(signal.SIGRTMAX) - 7
LOG = log.get("mpips.trace")
_begun = False


class RankTrace(NamedTuple):
    """The trace of one process.

    Attributes:
        who: The identity from the page of the process. Also `pid` (of the process), `thread` (the id of the main
            thread), and `clock` (the name of the clock that gave the times, see `clock`).
        records: The records that are still in the ring.
        overwritten: The number of older records that newer records have replaced.
    """

    who: dict[str, Any]
    records: list[CallRecord]
    overwritten: int

    @property
    def rank(self) -> int:
        return int(self.who["rank"])


def begin(rank: int, size: int) -> None:
    """Open this rank's page, and begin a trace if the launcher has asked for one. Later calls do nothing."""
    global _begun
    if _begun:
        return
    _begun = True
    try:
        own.begin(rank, size)
    except OSError as error:
        LOG.warning(
            "this rank has no page, so mpips why and mpips top cannot show it: %s: %s",
            folders.jobs_folder(),
            error.strerror or error,
        )
    log.begin_rank(size)
    path = own.path_beside_page(SUFFIX)
    if path is None:
        return
    # Python allows handlers to be set only in the main thread.
    with suppress(ValueError):
        if signal.getsignal(SIGNAL) == signal.SIG_DFL:
            signal.signal(SIGNAL, _on_signal)
            signal.siginterrupt(SIGNAL, False)
    if asked := os.environ.get(VARIABLE):
        _start(path, int(asked))


def _on_signal(number: int, frame: FrameType | None) -> None:
    # Start the trace in a new thread. The code that the signal has interrupted may hold a lock that tracing needs.
    _thread.start_new_thread(_trace_as_asked, ())


def _trace_as_asked() -> None:
    path = own.path_beside_page(SUFFIX)
    with suppress(OSError, ValueError, KeyError):
        if path is not None and not own.is_traced:
            request = json.loads((path.parent / REQUEST).read_text())
            if _start(path, request["bytes"]):
                time.sleep(max(0.0, (request["until_ns"] - time.monotonic_ns()) / 1e9))
                own.untrace()
                _describe(path)


def _start(path: Path, nbytes: int) -> bool:
    """Begin to record this rank's calls in a new file. If the file cannot be made, log a warning and return False."""
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
    own.trace(RecordRing(memoryview(mapped)[HEAD_BYTES:]))
    # The head is written again at exit, because the rank may get its role only after the trace has begun.
    atexit.register(_describe, path)
    return True


def _allocate(fd: int, nbytes: int) -> int:
    """Allocate memory for a ring of `nbytes`, or of half of that, a quarter, ... Return the length of the file.

    Raises:
        OSError: There is no memory even for `LEAST_BYTES`.
    """
    # All ranks may allocate at the same moment, and half of the free memory must be left for MPI.
    part = 2 * int(own.copy_identity()["size"])
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
    who = {**own.copy_identity(), "pid": os.getpid(), "thread": threading.main_thread().ident, "clock": clock()}
    raw = json.dumps(who).encode()[: HEAD_BYTES - 1]
    with suppress(OSError), open(path, "r+b") as file:
        file.write(raw.ljust(HEAD_BYTES, b"\0"))


def clock() -> str:
    """Return a string that names the monotonic clock of this process.

    Times of two processes may be compared only if their strings are equal: then both processes read the same clock.
    The string contains the id of this boot of the machine (or else the host name), because the clock starts at boot.
    """
    boot = offset = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # A Linux time namespace, which a container may have, adds an offset to the clock of its processes. So processes of
    # one machine read equal times only if their offsets are equal, and the offset is a part of the name.
    with suppress(OSError):
        offset = ".".join(Path("/proc/self/timens_offsets").read_text().splitlines()[0].split()[1:])
    return f"{boot or socket.gethostname()}.{offset or '0.0'}"


def read_raw(folder: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield the identity and the bytes of the ring of each traced process in a job's folder, even of killed ones."""
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
    """Return the traces that `read_raw` has read, sorted by rank."""
    traces = []
    for who, data in raw:
        records = ring.read(data)
        last = records[-1].sequence if records else 0
        traces.append(RankTrace(who, records, max(0, last - (len(data) - ring.HEAD_BYTES) // RECORD_BYTES)))
    return sorted(traces, key=lambda trace: (trace.rank, trace.who["pid"]))


def forget(folder: Path) -> None:
    """Remove the files that `read_raw` reads, because they take memory."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            path.unlink()
