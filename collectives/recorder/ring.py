"""A ring of fixed-size records, one for each timed call. One process writes it; other processes map and read it.

Each record begins with a sequence number, which is 0 while the record is being written and unique afterwards. A reader
compares the number before and after it copies the record, and discards a record that changed in between. The fields
that are the same in all calls of a plan, or of a key in a store, are packed once, as a *form* (name, bytes, and so on).
A record copies the form and adds numbers and times. Each record names its *lane*, i.e. its communicator or store.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from threading import RLock, get_ident
from typing import Literal, NamedTuple

MAGIC, VERSION = 0x6D7069707352696E, 1
# The format of a memoryview of 8-byte words on 64-bit Linux. With "Q", setting a word takes 1.5 times as long.
WORD: Literal["L"] = "L"
HEAD_BYTES, RECORD_BYTES = 64, 256
_NUMBERS = struct.Struct("=QqQQQQ")
_FORM = struct.Struct("=QQQq24s16s72s56s")
# the indexes of these words within a record
_NUMBER, _ROUND, _BEGUN, _ENDED = 1, 2, 4, 5
_FORM_AT = 8 + _NUMBERS.size
assert _FORM_AT + _FORM.size == RECORD_BYTES


class CallRecord(NamedTuple):
    """One timed call.

    Times are nanoseconds of the monotonic clock. `begun_ns` or `ended_ns` is 0 if the call has not started or ended.

    Attributes:
        number: The number of the call among the calls of its lane; 0 if they are not counted.
        round: For a call of a store, the round of the key; otherwise 0.
        lane: The identity of the communicator or store.
        part: For a sum on a server, the first element of the shard within its key; otherwise -1.
        line: The line of the program that made the plan, or the first call of the key.
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
        """The state as PyTorch names it: "scheduled", "started" or "completed"."""
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
    """Pack the fields that are the same in all records of a plan or key.

    Texts that are too long are cut.

    Args:
        lane: The identity of the communicator or store, 0 for neither.
        operation: The name of the call, such as "allreduce". At most 24 bytes.
        subject: The array or key of the call, in words. At most 72 bytes.
        nbytes: The bytes of the vector.
        elements: The elements of the vector.
        dtype: The element type. At most 16 bytes.
        part: See `CallRecord`.
        line: See `CallRecord`. At most 56 bytes.
    """
    texts = (operation.encode(), dtype.encode(), subject.encode(), line.encode())
    return _FORM.pack(lane, nbytes, elements, part, *texts)


class RecordRing:
    """The writing side of a ring in a buffer. New records replace the oldest ones. Any thread may write."""

    def __init__(self, buffer: memoryview | mmap.mmap) -> None:
        self._bytes = memoryview(buffer).cast("B")
        self._words = self._bytes[: len(self._bytes) // 8 * 8].cast(WORD)
        self.slots = (len(self._bytes) - HEAD_BYTES) // RECORD_BYTES
        self._words[:3] = memoryview(struct.pack("=QQQ", MAGIC, VERSION, self.slots)).cast("B").cast(WORD)
        self._sequence = 0
        self._lock = RLock()

    def begin(self, form: bytes, number: int = 0, round_: int = 0, starts: bool = True) -> int:
        """Begin the record of a call. Return its sequence number, which start() and end() take.

        Args:
            form: The fields that all records of the call share, from form().
            number: The number of the call in its lane.
            round_: The round of the key.
            starts: True if the call starts now, False if it is only scheduled and `start` will be called.
        """
        with self._lock:
            self._sequence = sequence = self._sequence + 1
            at = HEAD_BYTES + sequence % self.slots * RECORD_BYTES
            # The sequence number is 0 during the write, so that readers discard the record.
            self._words[at >> 3] = 0
            self._bytes[at + _FORM_AT : at + RECORD_BYTES] = form
            now = time.monotonic_ns()
            _NUMBERS.pack_into(self._bytes, at + 8, number, round_, now, now if starts else 0, 0, get_ident())
            self._words[at >> 3] = sequence
        return sequence

    def start(self, sequence: int, number: int = 0, round_: int = 0) -> None:
        """Record that a scheduled call starts now. Does nothing if its record has been replaced.

        Args:
            sequence: The number that begin() has returned.
            number: The number of the call in its lane.
            round_: The round of the key.
        """
        word = self._at(sequence)
        with self._lock:
            if self._words[word] == sequence:
                self._words[word + _NUMBER], self._words[word + _ROUND] = number, round_
                self._words[word + _BEGUN] = time.monotonic_ns()

    def end(self, sequence: int) -> None:
        """Record that a call has ended. Does nothing if its record has been replaced."""
        word = self._at(sequence)
        with self._lock:
            if self._words[word] == sequence:
                self._words[word + _ENDED] = time.monotonic_ns()

    def _at(self, sequence: int) -> int:
        return (HEAD_BYTES + sequence % self.slots * RECORD_BYTES) >> 3


def read(buffer: bytes | memoryview | mmap.mmap) -> list[CallRecord]:
    """Return the records of a ring in order. The ring may be in use: records that are being written are left out.

    Return [] if the buffer does not hold a ring.
    """
    data = memoryview(buffer).cast("B")
    words = data[: len(data) // 8 * 8].cast("Q")
    if len(data) < HEAD_BYTES or (words[0], words[1]) != (MAGIC, VERSION):
        return []
    records = []
    for slot in range(min(words[2], (len(data) - HEAD_BYTES) // RECORD_BYTES)):
        at = HEAD_BYTES + slot * RECORD_BYTES
        before = words[at >> 3]
        raw = bytes(data[at : at + RECORD_BYTES])
        if before and words[at >> 3] == before:
            records.append(_record(before, raw))
    words.release()
    data.release()
    return sorted(records)


def _record(sequence: int, raw: bytes) -> CallRecord:
    *numbers, operation, dtype, subject, line = _FORM.unpack_from(raw, _FORM_AT)
    texts = [text.rstrip(b"\0").decode(errors="replace") for text in (operation, dtype, subject, line)]
    return CallRecord(sequence, *_NUMBERS.unpack_from(raw, 8), *numbers, *texts)


def read_file(path: str | os.PathLike[str], offset: int = 0, nbytes: int = 0) -> list[CallRecord]:
    """Return the records of a ring that is in a file.

    Args:
        path: The file.
        offset: The first byte of the ring.
        nbytes: The length of the ring; 0 means up to the end of the file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is empty.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        whole = memoryview(mapped)
        part = whole[offset : offset + nbytes if nbytes else len(whole)]
        try:
            return read(part)
        finally:
            part.release()
            whole.release()
