"""The page of a rank: a small file in the machine's memory that says what the rank does. It outlives its process.

From this file a tool reads the rank's identity, its training step, what it waits for and which calls it began last. The
rank itself need not answer. The rank writes with `Page`, and the tool reads with `read`.

Layout, in this order:

    head        8-byte words, named in `HEAD`; then one byte for each 4 KiB of texts: 1 if memory is allocated for them
    identity    JSON: rank, role, host, program
    waits       JSON: what each thread waits for, since when, and for which ranks; short waits are left out
    end         JSON: how the rank has ended
    notes       JSON: numbers that the program reports, such as the loss
    groups      JSON: the ranks of each of the newest communicators
    load        JSON: for a server, the bytes received from each worker, and the number of waiting requests
    tables      JSON: the names of the embedding tables that have numbers
    marks       one word for each *lane* (a communicator or a store): 2^32 * number of the last call + its token
    numbers     for each table, the words named in `TABLE`
    ring        records with times (`ring`) of the calls that take long enough
    tokens      for each lane, the texts of its last `TOKENS` tokens
    names       texts of the tokens from `POOL` on; a store takes one of these tokens for each of its keys

A call that takes a microsecond can afford only a single 8-byte write, so a mark is one word. A *token* is a number that
stands for the text of a call, which is written only when the call is made for the first time. A sequence number guards
each JSON area: it is odd while the area is being written.

A page takes 112 KiB, and further memory for texts as they are written. MPI allocates from the same memory file system,
so a page must leave room for MPI (`allocate`).
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
from mpips.collectives.recorder.ring import HEAD_BYTES, RECORD_BYTES, WORD, CallRecord, RecordRing

MAGIC, VERSION = 0x6D70697073_52, 6
# The words of the head, in order. Times are nanoseconds of the monotonic clock, except began_ns, which is Unix time.
#   generation, step        the generation and the training step, plus 1; 0 means unknown
#   waited_ns, waits        the total time and the number of the waits that have ended
#   signal                  the signal on which the rank writes the stacks of its threads
#   calls                   the number of calls on communicators and stores whose lanes were freed
#   failures                how often a generation of a store, or a communicator, has ended with an error
#   checkpoints             the number of checkpoints that this rank has written
#   exchanges               the number of exchanges of parameters (a worker trains by itself between two exchanges)
#   exchange_ns             the time at which the last exchange ended
#   exchanged_bytes         the number of bytes that all exchanges have sent and received
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
# name of a word of the head -> its index
AT = {name: number for number, name in enumerate(HEAD)}
# size of each JSON area, and the offsets of the areas
TEXT_BYTES = 4096
IDENTITY, WAITS, END, NOTES, COMMUNICATORS, LOAD, TABLES = (TEXT_BYTES * number for number in range(1, 8))
LANES = 64
# the number of tokens of a lane whose texts are kept, and the number of bytes for each text
TOKENS = 64
TOKEN_BYTES = 256
# Each lane has a cache line of its own, which holds the mark and the lane's identity.
LANE_WORDS = 8
MARKS = TEXT_BYTES * 8
# The numbers of an embedding table. A server writes the first seven (see Table.stats). A worker writes the last four:
# how many rows it has pushed, asked servers for, and read in place, and how many of its pushes a server refused for
# lack of memory.
TABLE = (
    "rows",
    "bytes",
    "updates",
    "evicted",
    "refused",
    "counted",
    "removed",
    "pushed",
    "asked",
    "in_place",
    "refused_pushes",
)
MOST_TABLES = 64
TABLE_WORDS = 16
NUMBERS_AT = MARKS + LANES * LANE_WORDS * 8
RING = NUMBERS_AT + MOST_TABLES * TABLE_WORDS * 8
RING_RECORDS = 256
RING_BYTES = HEAD_BYTES + RING_RECORDS * RECORD_BYTES
# The offset of a row of bytes. For each chunk of texts, one byte is 1 if memory is allocated for the chunk.
CHUNKS = TEXT_BYTES // 2
CHUNK_BYTES = 4096
TEXTS = -(-(RING + RING_BYTES) // CHUNK_BYTES) * CHUNK_BYTES
# All lanes share the tokens from POOL on (the *pool*). The page keeps the texts of the newest POOL_TOKENS of them.
POOL = 1 << 31
POOL_TOKENS = 4096
NAMES = TEXTS + LANES * TOKENS * TOKEN_BYTES
PAGE_BYTES = NAMES + POOL_TOKENS * TOKEN_BYTES
# In one step, a page allocates at most 1 / PART of the free memory.
PART = 64
TOKEN_MASK = NUMBERS = (1 << 32) - 1
_TEXT = struct.Struct("=QQ")
_TOKEN = struct.Struct("=II")
JSON_BYTES = TEXT_BYTES - _TEXT.size


def allocate(fd: int, offset: int, nbytes: int, part: int) -> None:
    """Allocate memory for a range of a file, so that later writes to the range through a map are safe.

    If the memory file system is full, a write to a page without memory would kill the process (SIGBUS).

    Raises:
        OSError: The range is larger than 1 / `part` of the free memory. The rest is left for MPI.
    """
    held = os.fstatvfs(fd)
    # f_blocks is 0 on a file system without a limit.
    if held.f_blocks and nbytes * part > held.f_bavail * held.f_frsize:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are more than one in {part} of what is free there")
    os.posix_fallocate(fd, offset, nbytes)


def encode(content: object) -> bytes:
    """Return the bytes of JSON that an area of a page holds."""
    # backslashreplace turns a lone surrogate into \udxxx, which is JSON's escape for it.
    return json.dumps(content, ensure_ascii=False).encode(errors="backslashreplace")


class LastCall(NamedTuple):
    """The last call of a communicator or store, as another process reads it from the page.

    Calls of a store have number 0, because counting them would take longer than everything else that a mark needs.
    """

    identity: int
    number: int
    text: str


class PageContent(NamedTuple):
    """The content of a page."""

    head: Mapping[str, int]
    identity: Mapping[str, Any]
    waits: list[dict[str, Any]]
    end: Mapping[str, Any]
    lanes: list[LastCall]
    notes: Mapping[str, float]
    communicators: Mapping[str, Any]
    load: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, int]]


class Page:
    """The page of this rank, for writing. It is in a new file or, if no path is given, in private memory.

    Raises:
        OSError: There is no room for the file. No file is left behind.
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
        self.ring = RecordRing(memoryview(self._map)[RING : RING + RING_BYTES])

    def set(self, name: str, value: int) -> None:
        """Write a word of the head."""
        self.words[AT[name]] = value

    def write(self, area: int, content: list[Any] | dict[Any, Any]) -> None:
        """Write JSON into an area. If it is too long, drop the last items of a list, or the first items of a dict."""
        while len(raw := encode(content)) > JSON_BYTES:
            content = content[:-1] if isinstance(content, list) else dict([*content.items()][1:])
        at = area // 8
        # The sequence number is odd during the write, so that readers ignore the area.
        self.words[at] += 1
        self.words[at + 1] = len(raw)
        self._map[area + _TEXT.size : area + _TEXT.size + len(raw)] = raw
        self.words[at] += 1

    def take_table(self, name: str) -> memoryview:
        """Return words for the numbers of a new table, in the order of `TABLE`.

        After `MOST_TABLES` tables, the words are private memory that nobody reads.
        """
        if len(self._tables) == MOST_TABLES:
            return memoryview(bytearray(8 * TABLE_WORDS)).cast(WORD)
        at = NUMBERS_AT // 8 + len(self._tables) * TABLE_WORDS
        self._tables.append(name)
        self.write(TABLES, self._tables)
        return self.words[at : at + TABLE_WORDS]

    def take_lane(self, identity: int) -> int:
        """Take a free lane for a communicator or store. Return its number, or -1 if no lane is free."""
        if not self._free:
            return -1
        lane = self._free.pop()
        at = self.mark_at(lane)
        self.words[at], self.words[at + 1] = 0, identity
        return lane

    def give_lane(self, lane: int) -> None:
        """Free a lane, and add the number of calls made in it to the word `calls` of the head."""
        at = self.mark_at(lane)
        self.words[AT["calls"]] += self.words[at] >> 32
        self.words[at + 1] = 0
        self._free.append(lane)

    @staticmethod
    def mark_at(lane: int) -> int:
        """Return the index of the word that is the mark of a lane."""
        return MARKS // 8 + lane * LANE_WORDS

    def name(self, lane: int, token: int, text: str) -> None:
        """Write the text of a token of a lane. This overwrites the text of token `token - TOKENS`.

        Does nothing if no memory can be allocated for the text.
        """
        raw = text.encode()[: TOKEN_BYTES - _TOKEN.size]
        at = _token_at(lane, token)
        if not self._has_memory(at):
            return
        # The token is 0 during the write. So a reader sees that this is not the text of the token that it looks for.
        self._map[at : at + _TOKEN.size] = _TOKEN.pack(0, 0)
        self._map[at + _TOKEN.size : at + _TOKEN.size + len(raw)] = raw
        self._map[at : at + _TOKEN.size] = _TOKEN.pack(token, len(raw))

    def _has_memory(self, at: int) -> bool:
        """True if a text can be written at this offset. Allocates memory for the text if necessary."""
        chunk = (at - TEXTS) // CHUNK_BYTES
        if not self._map[CHUNKS + chunk]:
            if self._path is not None:
                try:
                    # Open the file each time, because some programs close all file descriptors that they do not know.
                    fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        allocate(fd, TEXTS + chunk * CHUNK_BYTES, CHUNK_BYTES, PART)
                    finally:
                        os.close(fd)
                except OSError:
                    return False
            self._map[CHUNKS + chunk] = 1
        return True

    def new_token(self, text: str) -> int:
        """Return a new token of the pool for a text. The text is kept until `POOL_TOKENS` more tokens were taken."""
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


def read(path: str | os.PathLike[str]) -> PageContent | None:
    """Return the content of a page, or None if the file is not a page of this version.

    Raises:
        OSError: The file cannot be read.
    """
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
    return PageContent(
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


def read_lanes(raw: bytes | mmap.mmap) -> list[LastCall]:
    """Return the last call of each lane, from the bytes of a page. The page may be in use."""
    lanes = []
    with memoryview(raw) as whole, whole.cast("Q") as words:
        for lane in range(LANES):
            at = Page.mark_at(lane)
            mark, identity = words[at : at + 2]
            if identity:
                lanes.append(LastCall(identity, mark >> 32, _text(raw, lane, mark & TOKEN_MASK)))
    return lanes


def read_records(path: str | os.PathLike[str]) -> list[CallRecord]:
    """Return the records in the ring of a page, which may be in use. Raises the errors of `ring.read_file`."""
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
    # Never read texts for which no memory is allocated. A read through a map would allocate memory, or kill this
    # process if no memory is free.
    if not raw[CHUNKS + (at - TEXTS) // CHUNK_BYTES]:
        return ""
    known, length = _TOKEN.unpack_from(raw, at)
    if not token or known != token:
        return ""
    return raw[at + _TOKEN.size : at + _TOKEN.size + length].decode(errors="replace")
