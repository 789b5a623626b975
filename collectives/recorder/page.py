"""The page of a rank: a small file in the machine's memory that says what the rank does. It outlives its process.

Whoever may read the file sees there, without a word from the rank, who it is, its step, what it waits for, and the call
that it has begun last. `Page` is the rank's side, and `read` the other side.

    head        words of 8 bytes: see `HEAD`; then a byte for each 4 KiB of texts: 1 where they have memory
    identity    JSON: who the rank is
    waits       JSON: what its threads wait for, since when, and for whom; only waits that last
    end         JSON: how it has ended
    notes       JSON: numbers that the program reports, such as the loss
    lanes       JSON: which ranks a lane joins, for the communicators made last
    load        JSON: of a server, bytes that it has taken in, from whom, and how many requests wait
    tables      JSON: the names of the tables of embeddings that have numbers
    marks       for each *lane*, which is a communicator or a store, one word: 2^32 * number of the call + its token
    numbers     for each table so many words: see `TABLE`
    ring        records with times (`ring`), of calls that take long enough
    tokens      for each lane the texts of the tokens, `TOKENS` of them in turn
    names       texts of tokens from `POOL` on, which stores share: there are as many as keys

A mark is one store of 8 bytes: all that a call of a microsecond can spare. Texts are written when a call is made for
the first time. JSON is guarded by a sequence number, odd while it is written. A page takes 112 KiB, and memory for
texts when they are written. MPI needs the same memory: see `allocate`.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpips.collectives.recorder import ring
from mpips.collectives.recorder.ring import HEAD_BYTES, RECORD_BYTES, WORD, Record, Ring

MAGIC, VERSION = 0x6D70697073_52, 5
HEAD = (
    "magic",
    "version",
    "pid",
    "thread",
    "began_ns",
    "generation",
    "step",
    "step_ns",
    "waited_ns",
    "waits",
    "signal",
    "calls",
    "failures",
    "checkpoints",
    "exchanges",
    "exchange_ns",
    "exchanged_bytes",
)
"""Words of the head. Times are of the monotonic clock, but for `began_ns`. `generation` and `step` are 1 more than
they are. `waited_ns`: how long the rank has waited in all, in `waits` waits that are over. `signal`: brings stacks.
`calls`: of lanes that were given back. `failures`: how often a generation, or a communicator, has ended by an error.
`checkpoints`: how many this rank has written. `exchanges`: of parameters, between which a worker trains by itself; when
the last one was over, and the bytes of all, up and down."""
AT = {name: number for number, name in enumerate(HEAD)}
TEXT_BYTES = 4096
IDENTITY, WAITS, END, NOTES, COMMUNICATORS, LOAD, TABLES = (TEXT_BYTES * number for number in range(1, 8))
LANES, TOKENS, TOKEN_BYTES = 64, 64, 256
LANE_WORDS = 8
MARKS = TEXT_BYTES * 8
TABLE = ("rows", "bytes", "updates", "evicted", "refused", "counted", "pushed", "asked", "in_place", "refused_pushes")
"""Numbers of a table. Of a server, what it has: those of `Table.stats`. Of a worker, what it has done: rows that it has
pushed, asked servers for and read in place, and pushes that a server had no memory for."""
MOST_TABLES, TABLE_WORDS = 64, 16
NUMBERS_AT = MARKS + LANES * LANE_WORDS * 8
RING, RING_RECORDS = NUMBERS_AT + MOST_TABLES * TABLE_WORDS * 8, 256
RING_BYTES = HEAD_BYTES + RING_RECORDS * RECORD_BYTES
CHUNKS, CHUNK_BYTES = TEXT_BYTES // 2, 4096
TEXTS = -(-(RING + RING_BYTES) // CHUNK_BYTES) * CHUNK_BYTES
POOL, POOL_TOKENS = 1 << 31, 4096
NAMES = TEXTS + LANES * TOKENS * TOKEN_BYTES
PAGE_BYTES = NAMES + POOL_TOKENS * TOKEN_BYTES
PART = 64
"""The part of the free memory, one in so many, that a page takes at most at a time."""
TOKEN_MASK = NUMBERS = (1 << 32) - 1
_TEXT = struct.Struct("=QQ")
_TOKEN = struct.Struct("=II")
JSON_BYTES = TEXT_BYTES - _TEXT.size


def allocate(fd: int, offset: int, nbytes: int, part: int) -> None:
    """Take memory for these bytes of a file. OSError where it is more than one in `part` of what is free.

    A write to what has no memory would be the process' end, and what is taken, MPI has no longer.
    """
    held = os.fstatvfs(fd)
    if held.f_blocks and nbytes * part > held.f_bavail * held.f_frsize:  # no blocks: they are not counted
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are more than one in {part} of what is free there")
    os.posix_fallocate(fd, offset, nbytes)


def encode(content: object) -> bytes:
    """Return JSON as an area holds it."""
    return json.dumps(content, ensure_ascii=False).encode(errors="backslashreplace")  # of a surrogate: JSON's escape


class Lane(NamedTuple):
    """The calls of one communicator or store, as another process reads them: the last one's number and text.

    Those of a store have no number: counting would cost more than all the rest.
    """

    identity: int
    number: int
    text: str


class Seen(NamedTuple):
    """Hold the content of a page."""

    head: Mapping[str, int]
    identity: Mapping[str, Any]
    waits: list[dict[str, Any]]
    end: Mapping[str, Any]
    lanes: list[Lane]
    notes: Mapping[str, float]
    communicators: Mapping[str, Any]
    load: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, int]]


class Page:
    """A rank's own page, in a new file, or, without one, in memory that nobody else reads.

    OSError, and no file, where there is no room.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._map = mmap.mmap(-1, PAGE_BYTES) if path is None else _map_new(path)
        self.words = memoryview(self._map).cast(WORD)
        self.words[AT["version"]] = VERSION
        self.words[AT["magic"]] = MAGIC
        self._free = list(range(LANES - 1, -1, -1))
        self._named = 0
        self._tables: list[str] = []
        self.ring = Ring(memoryview(self._map)[RING : RING + RING_BYTES])

    def set(self, name: str, value: int) -> None:
        """Write a word of the head."""
        self.words[AT[name]] = value

    def write(self, area: int, content: list[Any] | dict[Any, Any]) -> None:
        """Write JSON into an area: of a list the first members that fit, of an object the last."""
        while len(raw := encode(content)) > JSON_BYTES:
            content = content[:-1] if isinstance(content, list) else dict([*content.items()][1:])
        at = area // 8
        self.words[at] += 1
        self.words[at + 1] = len(raw)
        self._map[area + _TEXT.size : area + _TEXT.size + len(raw)] = raw
        self.words[at] += 1

    def take_table(self, name: str) -> memoryview:
        """Return the numbers of a table, as `TABLE` names them; beyond `MOST_TABLES`, some that nobody reads."""
        if len(self._tables) == MOST_TABLES:
            return memoryview(bytearray(8 * TABLE_WORDS)).cast(WORD)
        at = NUMBERS_AT // 8 + len(self._tables) * TABLE_WORDS
        self._tables.append(name)
        self.write(TABLES, self._tables)
        return self.words[at : at + TABLE_WORDS]

    def take_lane(self, identity: int) -> int:
        """Return the number of a lane that is free from now on for who asks; -1 where there is none."""
        if not self._free:
            return -1
        lane = self._free.pop()
        at = self.mark_at(lane)
        self.words[at], self.words[at + 1] = 0, identity
        return lane

    def give_lane(self, lane: int) -> None:
        """Give a lane back."""
        at = self.mark_at(lane)
        self.words[AT["calls"]] += self.words[at] >> 32
        self.words[at + 1] = 0
        self._free.append(lane)

    @staticmethod
    def mark_at(lane: int) -> int:
        """Return which word is the mark of a lane."""
        return MARKS // 8 + lane * LANE_WORDS

    def name(self, lane: int, token: int, text: str) -> None:
        """Write what a token of a lane stands for, in the place of the token `TOKENS` before it, if there is room."""
        raw = text.encode()[: TOKEN_BYTES - _TOKEN.size]
        at = _token_at(lane, token)
        if not self._has_memory(at):
            return
        self._map[at : at + _TOKEN.size] = _TOKEN.pack(0, 0)
        self._map[at + _TOKEN.size : at + _TOKEN.size + len(raw)] = raw
        self._map[at : at + _TOKEN.size] = _TOKEN.pack(token, len(raw))

    def _has_memory(self, at: int) -> bool:
        """Return whether a text can be written there, for which memory is taken where there is room."""
        chunk = (at - TEXTS) // CHUNK_BYTES
        if not self._map[CHUNKS + chunk]:
            if self._path is not None:
                try:
                    fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)  # not kept: programs close any
                    try:
                        allocate(fd, TEXTS + chunk * CHUNK_BYTES, CHUNK_BYTES, PART)
                    finally:
                        os.close(fd)
                except OSError:
                    return False
            self._map[CHUNKS + chunk] = 1
        return True

    def new_token(self, text: str) -> int:
        """Return a token that no lane has, which stands for this, until `POOL_TOKENS` others have been made."""
        self._named += 1
        self.name(0, POOL + self._named, text)
        return POOL + self._named


def _map_new(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        allocate(fd, 0, TEXTS, PART)
        os.ftruncate(fd, PAGE_BYTES)
        return mmap.mmap(fd, PAGE_BYTES)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(fd)


def _token_at(lane: int, token: int) -> int:
    if token >= POOL:
        return NAMES + (token - POOL) % POOL_TOKENS * TOKEN_BYTES
    return TEXTS + (lane * TOKENS + token % TOKENS) * TOKEN_BYTES


def read(path: str | os.PathLike[str]) -> Seen | None:
    """Return what a page says; None where the file is none, or of another version. OSError as of files."""
    raw = Path(path).read_bytes()
    if len(raw) != PAGE_BYTES:
        return None
    words = memoryview(raw).cast("Q")
    head = dict(zip(HEAD, words[: len(HEAD)].tolist()))
    if (head["magic"], head["version"]) != (MAGIC, VERSION):
        return None
    texts = [_json(raw, area) for area in (IDENTITY, WAITS, END, NOTES, COMMUNICATORS, LOAD, TABLES)]
    identity, waits, end, notes, communicators, load, names = texts
    rows = (words[at:] for at in range(NUMBERS_AT // 8, RING // 8, TABLE_WORDS))
    tables = {name: dict(zip(TABLE, row)) for name, row in zip(names or (), rows)}
    return Seen(
        head,
        identity or {},
        waits or [],
        end or {},
        read_lanes(raw),
        notes or {},
        communicators or {},
        load or {},
        tables,
    )


def read_lanes(raw: bytes | mmap.mmap) -> list[Lane]:
    """Return the lanes that the bytes of a page hold, also of a living rank's."""
    lanes = []
    with memoryview(raw) as whole, whole.cast("Q") as words:
        for lane in range(LANES):
            at = Page.mark_at(lane)
            mark, identity = words[at : at + 2]
            if identity:
                lanes.append(Lane(identity, mark >> 32, _text(raw, lane, mark & TOKEN_MASK)))
    return lanes


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Return the whole records in the ring of a page, also of a living rank. OSError and ValueError as of `ring`."""
    return ring.read_file(path, RING, RING_BYTES)


def _json(raw: bytes, area: int) -> Any:
    sequence, length = _TEXT.unpack_from(raw, area)
    if sequence % 2 or length > TEXT_BYTES:
        return None
    try:
        return json.loads(raw[area + _TEXT.size : area + _TEXT.size + length] or b"null")
    except ValueError:
        return None


def _text(raw: bytes | mmap.mmap, lane: int, token: int) -> str:
    at = _token_at(lane, token)
    if not raw[CHUNKS + (at - TEXTS) // CHUNK_BYTES]:  # a look at it through a map would take memory, or end this one
        return ""
    known, length = _TOKEN.unpack_from(raw, at)
    if not token or known != token:
        return ""
    return raw[at + _TOKEN.size : at + _TOKEN.size + length].decode(errors="replace")
