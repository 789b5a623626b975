"""A ring of fixed records: one for each call that is timed, in any memory that others can map. One writes, many read.

A record is written behind its sequence number: 0 while it is written, then the number that no other record has. A
reader takes the number before and after it copies, so that what it returns is whole. What a call always has in common
(its name, key, bytes) is packed once, as a *form*; a record copies it and adds numbers and times.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from threading import RLock, get_ident
from typing import Literal, NamedTuple

MAGIC, VERSION = 0x6D7069707352696E, 1
WORD: Literal["L"] = "L"
"""Of memoryviews: 8 bytes on 64-bit Linux. To set one as "Q" takes half as long again."""
HEAD_BYTES, RECORD_BYTES = 64, 256
_NUMBERS = struct.Struct("=QqQQQQ")
_FORM = struct.Struct("=QQQq24s16s72s56s")
_NUMBER, _ROUND, _BEGUN, _ENDED = 1, 2, 4, 5
_FORM_AT = 8 + _NUMBERS.size
assert _FORM_AT + _FORM.size == RECORD_BYTES


class Record(NamedTuple):
    """One call. `number` counts the calls of its `lane`, the identity of a communicator or store; 0: not counted.

    Times are nanoseconds of the monotonic clock, 0 for what has not come. `part`: of a server's sum the first element
    of the shard in its key, of a push or pull -1. `round`: of the key. `line`: of the program, where it made this call
    of this plan or key for the first time.
    """

    sequence: int
    number: int
    round: int
    made_ns: int
    begun_ns: int
    ended_ns: int
    thread: int
    lane: int
    nbytes: int
    elements: int
    part: int
    operation: str
    dtype: str
    subject: str
    line: str

    @property
    def state(self) -> str:
        """Return "scheduled", "started" or "completed"."""
        return "completed" if self.ended_ns else "started" if self.begun_ns else "scheduled"


def form(
    lane: int,
    operation: str,
    subject: str = "",
    nbytes: int = 0,
    elements: int = 0,
    dtype: str = "",
    part: int = -1,
    line: str = "",
) -> bytes:
    """Return what records of a call have in common; texts are cut to 24, 72, 16 and 56 bytes."""
    texts = (operation.encode(), dtype.encode(), subject.encode(), line.encode())
    return _FORM.pack(lane, nbytes, elements, part, *texts)


class Ring:
    """Write records into a buffer, which lives as long as this; the newest replace the oldest. Any thread may write."""

    def __init__(self, buffer: memoryview | mmap.mmap) -> None:
        self._bytes = memoryview(buffer).cast("B")
        self._words = self._bytes[: len(self._bytes) // 8 * 8].cast(WORD)
        self.slots = (len(self._bytes) - HEAD_BYTES) // RECORD_BYTES
        self._words[:3] = memoryview(struct.pack("=QQQ", MAGIC, VERSION, self.slots)).cast("B").cast(WORD)
        self._sequence = 0
        self._lock = RLock()

    def begin(self, form: bytes, number: int = 0, round_: int = 0, starts: bool = True) -> int:
        """Begin a record, of a call that starts now, or (not `starts`) is scheduled; return what `end` takes."""
        with self._lock:
            self._sequence = sequence = self._sequence + 1
            at = HEAD_BYTES + sequence % self.slots * RECORD_BYTES
            self._words[at >> 3] = 0
            self._bytes[at + _FORM_AT : at + RECORD_BYTES] = form
            now = time.monotonic_ns()
            _NUMBERS.pack_into(self._bytes, at + 8, number, round_, now, now if starts else 0, 0, get_ident())
            self._words[at >> 3] = sequence
        return sequence

    def start(self, sequence: int, number: int = 0, round_: int = 0) -> None:
        """Say that a scheduled call starts now, as this number of its lane, in this round of its key."""
        word = self._at(sequence)
        with self._lock:
            if self._words[word] == sequence:
                self._words[word + _NUMBER], self._words[word + _ROUND] = number, round_
                self._words[word + _BEGUN] = time.monotonic_ns()

    def end(self, sequence: int) -> None:
        """Say that a call is over. Does nothing where its record has been replaced."""
        word = self._at(sequence)
        with self._lock:
            if self._words[word] == sequence:
                self._words[word + _ENDED] = time.monotonic_ns()

    def _at(self, sequence: int) -> int:
        return (HEAD_BYTES + sequence % self.slots * RECORD_BYTES) >> 3


def read(buffer: bytes | memoryview | mmap.mmap) -> list[Record]:
    """Return the whole records of a ring in their order, also of one that is being written. [] where it is none."""
    data = memoryview(buffer).cast("B")
    words = data[: len(data) // 8 * 8].cast("Q")
    if len(data) < HEAD_BYTES or (words[0], words[1]) != (MAGIC, VERSION):
        return []
    found = []
    for slot in range(min(words[2], (len(data) - HEAD_BYTES) // RECORD_BYTES)):
        at = HEAD_BYTES + slot * RECORD_BYTES
        before = words[at >> 3]
        raw = bytes(data[at : at + RECORD_BYTES])
        if before and words[at >> 3] == before:
            found.append(_record(before, raw))
    words.release()
    data.release()
    return sorted(found)


def _record(sequence: int, raw: bytes) -> Record:
    *numbers, operation, dtype, subject, line = _FORM.unpack_from(raw, _FORM_AT)
    texts = [text.rstrip(b"\0").decode(errors="replace") for text in (operation, dtype, subject, line)]
    return Record(sequence, *_NUMBERS.unpack_from(raw, 8), *numbers, *texts)


def read_file(path: str | os.PathLike[str], offset: int = 0, nbytes: int = 0) -> list[Record]:
    """Return the whole records of the ring that lies in a file from `offset` on (0 bytes: up to its end). OSError as
    of files; ValueError for an empty one."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        whole = memoryview(mapped)
        part = whole[offset : offset + nbytes if nbytes else len(whole)]
        try:
            return read(part)
        finally:
            part.release()
            whole.release()
