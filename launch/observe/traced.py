"""Traces of a job's ranks on this host: ask ranks for them, and read them. As a program it does so for another host.

`mpips run` and `mpips trace` start it there, and ask by lines, as `launch.observe.hosts` says:

    time                the name of the clock that is read there, and its time in nanoseconds
    trace SECONDS       "" when the time is over, or why no rank is traced
    read                of each process who it is, and its ring, compressed; they are removed there
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path
from typing import Any

from collectives import files
from collectives.recorder import own, tracing
from launch.observe.gather import catches

QUICKLY = 1
"""zlib's level."""
LOOK_SECONDS = 0.1
"""Between two looks whether ranks live."""


def trace_ranks(folder: Path, seconds: float) -> str:
    """Have the ranks of a job on this host trace themselves for so many seconds, or to their end. Blocking.

    Return "", or why not.
    """
    pids = [int(path.stem) for path in folder.glob(f"*{own.PAGE}")]
    asked = [pid for pid in pids if own.lives(pid) and _hears(pid)]
    if any(folder.glob(f"*{tracing.SUFFIX}")):
        return f"job {folder.name} is traced already: wait for the other `mpips trace`, or the job"
    if not asked:
        return f"no rank of job {folder.name} lives here that can be traced"
    request = folder / tracing.REQUEST
    until = time.monotonic_ns() + round(seconds * 1e9)
    files.write(request, json.dumps({"bytes": tracing.RING_BYTES, "until_ns": until}).encode())
    try:
        for pid in asked:
            with suppress(OSError):
                os.kill(pid, tracing.SIGNAL)
        while time.monotonic_ns() < until and any(map(own.lives, asked)):
            time.sleep(min(LOOK_SECONDS, max(0.0, (until - time.monotonic_ns()) / 1e9)))
    except BaseException:
        tracing.forget(folder)
        raise
    finally:
        request.unlink(missing_ok=True)
    return ""


def _hears(pid: int) -> bool:
    with suppress(OSError):
        return catches(pid, tracing.SIGNAL)
    return False


def pack(data: bytes) -> str:
    """Return a ring as text."""
    return b64encode(zlib.compress(data, QUICKLY)).decode()


def unpack(text: str) -> bytes:
    """Return the ring that `pack` was given."""
    return zlib.decompress(b64decode(text))


def main(job: str) -> None:
    """Answer questions about a job's traces on this host, a line each, until there are no more."""
    folder = own.folder() / job
    unread = False
    try:
        for line in sys.stdin:
            number, what, *words = line.split()
            answer: Any
            if what == "time":
                answer = tracing.clock(), time.monotonic_ns()
            elif not own.is_ours(folder):
                answer = f"no rank of job {job} is here" if what == "trace" else []
            elif what == "trace":
                answer = trace_ranks(folder, float(words[0]))
                unread = not answer
            else:
                answer, unread = [(who, pack(data)) for who, data in tracing.read_raw(folder)], False
                tracing.forget(folder)
                own.leave(folder)
            sys.stdout.write(json.dumps([int(number), answer]) + "\n")
            sys.stdout.flush()
    finally:
        if unread:  # who has asked is gone
            tracing.forget(folder)


if __name__ == "__main__":
    main(sys.argv[1])
