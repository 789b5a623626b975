"""Write and read a checkpoint's file, piece by piece (safetensors, checksums); `finish` makes all valid at once.

`Reader` opens what a store has saved, and sees that it holds what its header promises. `Writer` and `TensorFile` write
and read arrays, piece by piece.

The checksums are CRC-32 and stand in the metadata, under `mpips.crc32`: that of the header, then one of each tensor in
the order in which they lie. The header's own is that of the file up to the first tensor, with zeros in its own place.
To other programs it is a word like others. A flipped bit is always noticed, and a file cut short, too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import zlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 by name)
import msgspec
import numpy as np

from mpips.collectives.errors import warn
from mpips.collectives.files import NewFile
from mpips.store.keys.key import Array
from mpips.store.options import MOST
from mpips.store.transport.frames import MakeTable
from mpips.tables import row_optimizers
from mpips.tables.rows import arrays_of

STORE = "mpips.store"
"""The word of the metadata that has the header."""
VERSION = 2
"""Since there are tables; a file without any has version 1."""


class Record(msgspec.Struct):
    """One key, as the header tells of it."""

    key: int | str
    shape: tuple[int, ...]
    dtype: str
    round: int
    """The round after which it was saved."""
    step: int
    """How often the optimizer had updated it."""
    state: list[str]
    """Dtypes of the optimizer's arrays of it, each of as many elements as the key."""
    optimizer: dict[str, Any] | None = None
    """The key's own optimizer, as data; None: the default."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def floats(self) -> bool:
        """Return whether an optimizer can update it, and pushes of it are compressed."""
        return np.dtype(self.dtype).kind not in "iub"


class TableRecord(msgspec.Struct):
    """One table, as the header tells of it: how servers are told of it, its rows, and the updates made."""

    card: MakeTable
    rows: int
    updates: int

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """Return what the file holds of it, with its names. ValueError where its optimizer is unknown here."""
        optimizer = row_optimizers.decode(self.card.optimizer, self.card.numbers)
        for name, (dtype, shape) in arrays_of(self.card.dim, np.dtype(self.card.dtype), optimizer).items():
            yield prefix + name, Tensor(dtype, (self.rows, *shape))


class Header(msgspec.Struct):
    """The header of a file, beside its tensors."""

    version: int
    kind: str
    """Of the store that was saved; for readers."""
    options: dict[str, Any]
    """Of the store that was saved; for readers."""
    records: list[Record]
    optimizer: dict[str, Any] | None
    """The default optimizer, as data; None: there is none."""
    compression: dict[str, Any] | None
    residuals: int
    """How many workers or clients compressed their pushes; 0: none."""
    tables: list[TableRecord] = []

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Return all that the file holds, with its names."""
        for record in self.records:
            yield value_name(record.key), Tensor(np.dtype(record.dtype), record.shape)
            for slot, dtype in enumerate(record.state):
                yield state_name(record.key, slot), Tensor(np.dtype(dtype), (record.size,))
            for group in range(self.residuals if record.floats else 0):
                yield residual_name(record.key, group), Tensor(residual_dtype(record.dtype), (record.size,))
        for table in self.tables:
            yield from table.tensors(table_prefix(table.card.table))


def value_name(key: int | str) -> str:
    """Return the tensor of a key's values."""
    return f"value/{key}"


def state_name(key: int | str, slot: int) -> str:
    """Return the tensor of one array of the optimizer's state of a key."""
    return f"state{slot}/{key}"


def residual_name(key: int | str, group: int) -> str:
    """Return the tensor of what one worker's or client's compression kept back of a key."""
    return f"residual{group}/{key}"


def table_prefix(table: str) -> str:
    """Return how the names of a table's tensors begin."""
    return f"table/{table}/"


def residual_dtype(dtype: str) -> np.dtype:
    """In what compression keeps the rest of a key of this dtype: float32 for 16-bit floats."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def file_name(what: str, argument: str, path: object) -> str:
    """Return the path as a str; TypeError or ValueError, which name call and argument, where no file can have that
    name."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise TypeError(f"{what}: {argument} {path!r} is of type {type(path).__name__}: give a str or a Path")
    if not name:
        raise ValueError(f"{what}: {argument} is empty: give the name of a file")
    if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"{what}: {argument} {name!r} has a character that cannot be in it: choose another name")
    return name


def why(error: Exception) -> str:
    """Return what went wrong with a file, without its name."""
    return getattr(error, "strerror", None) or str(error)


class Reader:
    """A checkpoint of a store that is open; whatever is put in its place meanwhile, this one is read.

    ValueError where it is none, cannot be read, is damaged, or lacks something that its header promises.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(TensorFile(path))
            self.path = self._file.path
            text = self._file.metadata.get(STORE)
            if text is None:
                raise ValueError(f"{self.path} was not written by save: it has no header of a store")
            try:
                self.header = msgspec.json.decode(text, type=Header)
                self.encoded = msgspec.msgpack.encode(self.header)
                """The header for messages."""
            except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
                raise ValueError(f"{self.path} cannot be read: {error}") from error
            self._see_header()
            self._see_tensors()
            self._file.see_sums((STORE,))
            stack.pop_all()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def get(self, name: str, rows: slice | None = None) -> Array:
        """Return a tensor, writable, or these rows of it. ValueError where the disk does not give it."""
        return self._file.get(name, rows)

    def _see_header(self) -> None:
        if not 1 <= self.header.version <= VERSION:
            version = f"has version {self.header.version}, this program reads versions up to {VERSION}"
            raise ValueError(f"{self.path} {version}: use a newer one")
        seen = set()
        for record in self.header.records:
            if record.key in seen:
                raise ValueError(f"{self.path} names key {record.key!r} twice: save it anew")
            seen.add(record.key)
            for dtype in (record.dtype, *record.state):
                if dtype not in NAMES:
                    raise ValueError(f"{self.path}: key {record.key!r} is of {dtype}: {HOLDS}")
            for name, number in (("step", record.step), ("round", record.round)):
                if not 0 <= number <= MOST:
                    raise ValueError(f"{self.path}: key {record.key!r} has {name} {number}: give one in [0, 2**63)")
        for table in self.header.tables:
            self._see_table(table)
            if table.card.table in seen:
                raise ValueError(f"{self.path} names {table.card.table!r} twice: save it anew")
            seen.add(table.card.table)
        if not 0 <= self.header.residuals <= MOST:
            raise ValueError(f"{self.path} has {self.header.residuals} residuals: give a number in [0, 2**63)")
        if self.header.residuals and self.header.compression is None:
            raise ValueError(f"{self.path} has residuals, and no compression that kept them back: save it anew")

    def _see_table(self, table: TableRecord) -> None:
        name, card = f"{self.path}: table {table.card.table!r}", table.card
        if card.dtype not in ("float32", "float64"):
            raise ValueError(f"{name} is of {card.dtype}, and a table holds float32 or float64: save it anew")
        for word, number, least in (("dim", card.dim, 1), ("updates", table.updates, 0), ("rows", table.rows, 0)):
            if not least <= number <= MOST:
                raise ValueError(f"{name} has {word} {number}: give one in [{least}, 2**63)")
        try:
            list(table.tensors(""))
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise ValueError(f"{name}: {error}") from error

    def _see_tensors(self) -> None:
        for name, promised in self.header.tensors():
            if name not in self._file.tensors:
                raise ValueError(f"{self.path} has no tensor {name!r}, which its header promises: save it anew")
            if self._file.tensors[name] != promised:
                found = f"{self._file.tensors[name]}, its header promises {promised}"
                raise ValueError(f"{self.path}: tensor {name!r} is {found}: save anew")


def metadata(header: Header) -> dict[str, str]:
    """Return the header as safetensors' metadata."""
    return {STORE: msgspec.json.encode(header).decode()}


NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
}
"""Every dtype that a file can hold, and what safetensors calls it."""
DTYPES = {theirs: np.dtype(name) for name, theirs in NAMES.items()}

HOLDS = f"a checkpoint holds {', '.join(NAMES)}"

SUMS = "mpips.crc32"
START = b'{"__metadata__": {"' + SUMS.encode() + b'": "'
"""How a header begins that has checksums; they follow."""
DIGITS = 8
LENGTH_BYTES = 8
MOST_HEADER = 100_000_000
"""Bytes of a header, as other programs bound it, too."""
PIECE_BYTES = 1 << 20


class Tensor(NamedTuple):
    """Dtype and shape of an array in a file."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{NAMES[self.dtype.name]}{self.shape}"


class Writer:
    """A file that is being written beside `path`; `finish` puts it in place.

    Raises OSError where it cannot be made: `path` is a folder, a device or a pipe, or its folder is not there. What
    makes a later step fail, `finish` raises.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = NewFile(path)
        self.path = self._file.path
        self._header = bytearray()
        """With its length before it, and zeros in place of the checksums."""
        self._places: dict[str, tuple[int, Tensor]] = {}
        self._sums: dict[str, int] = {}
        """Of what has been written of each tensor, in the order of the file."""
        self._written: dict[str, int] = {}
        """Elements of each tensor."""
        self._failure: OSError | None = None

    def begin(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write the header; once, before `write`. ValueError where a dtype is none that the format knows."""
        words = {name: text for name, text in metadata.items() if name != SUMS}
        header: dict[str, Any] = {"__metadata__": {SUMS: "0" * DIGITS * (1 + len(tensors)), **words}}
        offset, offsets = 0, {}
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):  # aligned, then
            if tensor.dtype.name not in NAMES:
                raise ValueError(f"{name} is of {tensor.dtype.name}: {HOLDS}")
            offsets[name], end = offset, offset + tensor.nbytes
            header[name] = {
                "dtype": NAMES[tensor.dtype.name],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._header += len(text).to_bytes(LENGTH_BYTES, "little") + text
        self._sums = dict.fromkeys(offsets, 0)
        self._written = dict.fromkeys(offsets, 0)
        base = len(self._header)
        self._put(b"", base + offset)
        self._put(self._header, 0)
        self._places = {name: (base + offsets[name], tensor) for name, tensor in tensors.items()}

    def write(self, name: str, start: int, values: Array) -> None:
        """Elements from `start` on of a tensor, flat, of its dtype; those of a tensor one after the other."""
        place, tensor = self._places[name]
        assert values.dtype == tensor.dtype and start + values.size <= math.prod(tensor.shape), name
        assert start == self._written[name], name
        self._written[name] += values.size
        if values.size:
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
            self._sums[name] = zlib.crc32(data, self._sums[name])
            self._put(data, place + start * tensor.dtype.itemsize)

    def append(self, name: str, values: Array) -> None:
        """Write the next elements of a tensor."""
        self.write(name, self._written[name], values)

    def finish(self) -> None:
        """Put the file in place, where it stays whatever happens to the machine. Blocks until the disk has it."""
        first = LENGTH_BYTES + len(START)
        sums = "".join(f"{value:0{DIGITS}x}" for value in self._sums.values()).encode()
        self._header[first + DIGITS : first + DIGITS + len(sums)] = sums
        self._header[first : first + DIGITS] = b"%08x" % zlib.crc32(self._header)
        self._put(self._header[first : first + DIGITS + len(sums)], first)
        try:
            if self._failure is not None:
                raise self._failure
            self._file.finish()
        finally:
            self._file.abandon()

    def abandon(self) -> None:
        """Leave what was at `path` as it was. Once `finish` has begun: nothing."""
        self._file.abandon()

    def _put(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write at a place; nothing: let the file be so long."""
        left = memoryview(data)
        try:
            if not len(left):
                os.truncate(self._file.fd, offset)
            while len(left) and self._failure is None:
                written = os.pwrite(self._file.fd, left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            self._failure = error


def open_writer(path: str) -> Writer:
    """Return the writer; ValueError where there cannot be a file."""
    try:
        return Writer(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {why(error)}") from error


def write(path: str | os.PathLike[str], arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write arrays of any shapes and a few words into one file. Blocking; OSError where it cannot be written."""
    with contextlib.ExitStack() as stack:
        writer = Writer(path)
        stack.callback(writer.abandon)
        writer.begin({name: Tensor(array.dtype, array.shape) for name, array in arrays.items()}, metadata)
        for name, array in arrays.items():
            writer.write(name, 0, array)
        writer.finish()


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor, as the header tells of it."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorFile:
    """A file of safetensors that is open; whatever is put in its place meanwhile, this one is read.

    `tensors`: what it holds, in the order in which it lies there. `metadata`: its words. ValueError where it is none,
    cannot be read, or is damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.tensors: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}
        self._sums: list[str] | None = None
        """Of the tensors; None: an older program wrote the file."""
        self._offsets: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            self._fd = self._opened()
            stack.callback(self.close)
            self._see_header(*self._header())
            stack.pop_all()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Read no more of it."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def see_sums(self, known: Collection[str], warns: bool = True) -> None:
        """ValueError where a tensor does not fit its checksum. A file whose words are `known` ones alone, as before
        there were checksums, is taken with a warning, which one rank gives."""
        if self._sums is None and set(self.metadata) <= set(known):
            if warns:
                older = "has no checksums, as an older mpips wrote it"
                warn(f"{self.path} {older}: damage to it is not seen; save it anew")
            return
        if self._sums is None:
            raise self._damaged(f"its checksums are not where they belong (who writes it anew leaves out {SUMS!r})")
        buffer = memoryview(bytearray(min(PIECE_BYTES, max((t.nbytes for t in self.tensors.values()), default=0))))
        for (name, tensor), expected in zip(self.tensors.items(), self._sums):
            found, offset, left = 0, self._offsets[name], tensor.nbytes
            while left:
                piece = buffer[: min(left, len(buffer))]
                self._read(piece, offset)
                found, offset, left = zlib.crc32(piece, found), offset + len(piece), left - len(piece)
            if f"{found:0{DIGITS}x}" != expected:
                raise self._damaged(f"tensor {name!r} does not fit its checksum")

    def get(self, name: str, rows: slice | None = None) -> Array:
        """Return a tensor, writable, or these rows of it. ValueError where it is not there, or the disk does not give
        it."""
        if name not in self.tensors:
            raise ValueError(f"{self.path} has no tensor {name!r}: save it anew")
        dtype, shape = self.tensors[name]
        offset = self._offsets[name]
        if rows is not None:
            width = math.prod(shape[1:]) * dtype.itemsize
            first, stop, _ = rows.indices(shape[0])
            offset, shape = offset + first * width, (max(0, stop - first), *shape[1:])
        array = np.empty(shape, dtype)
        if array.size:
            self._read(array.reshape(-1).view(np.uint8).data, offset)
        return array

    def _opened(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise ValueError(f"{self.path} cannot be read: there is no such file") from error
        except (OSError, ValueError) as error:
            raise self._unreadable(getattr(error, "strerror", None) or str(error)) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise self._unreadable("it is no regular file: give one that was saved")
        return fd

    def _unreadable(self, why: str) -> ValueError:
        return ValueError(f"{self.path} cannot be read: {why}")

    def _damaged(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is damaged: {why}; take another checkpoint")

    def _header(self) -> tuple[bytes, int]:
        """Return the header, and how many bytes follow it."""
        size = os.fstat(self._fd).st_size
        length = bytearray(LENGTH_BYTES)
        if size >= LENGTH_BYTES:
            self._read(memoryview(length), 0)
        count = int.from_bytes(length, "little")
        if not 2 <= count <= min(size - LENGTH_BYTES, MOST_HEADER):
            raise self._unreadable("it is no file of safetensors, or was cut short")
        text = bytearray(count)
        self._read(memoryview(text), LENGTH_BYTES)
        if text.startswith(START):
            digits = slice(len(START), len(START) + DIGITS)
            expected, text[digits] = bytes(text[digits]), b"0" * DIGITS
            if b"%08x" % zlib.crc32(text, zlib.crc32(length)) != expected:
                raise self._damaged("its header does not fit its checksum")
        return bytes(text), size - LENGTH_BYTES - count

    def _see_header(self, text: bytes, size: int) -> None:
        """Take tensors and words out of a header; ValueError where they do not fit `size` bytes of data."""
        try:
            raw = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            self.metadata = msgspec.json.decode(raw.pop("__metadata__", b"{}"), type=dict[str, str])
            entries = {name: msgspec.json.decode(entry, type=_Entry) for name, entry in raw.items()}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._unreadable(f"its header is none of safetensors: {error}") from error
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
            if entry.dtype not in DTYPES:
                raise ValueError(f"{self.path}: {name!r} is of {entry.dtype!r}: {HOLDS}")
            tensor = Tensor(DTYPES[entry.dtype], entry.shape)
            if min(entry.shape, default=0) < 0 or entry.data_offsets != (end, end + tensor.nbytes):
                raise self._unreadable(f"{name!r} does not lie where its shape and dtype put it")
            self.tensors[name], self._offsets[name] = tensor, LENGTH_BYTES + len(text) + end
            end += tensor.nbytes
        if end != size:
            raise self._unreadable(f"it has {size} bytes of tensors and needs {end}: it was cut short, or is damaged")
        if text.startswith(START):
            sums = self.metadata[SUMS][DIGITS:]
            self._sums = [sums[start : start + DIGITS] for start in range(0, len(sums), DIGITS)]
            if len(sums) != DIGITS * len(self.tensors):
                raise self._damaged("it has not as many checksums as tensors")

    def _read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer from a place of the file; ValueError where the disk does not give it."""
        left = buffer
        try:
            while len(left):
                count = os.preadv(self._fd, [left], offset)
                if not count:
                    raise self._unreadable("it was cut short")
                left, offset = left[count:], offset + count
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error
