"""Write and read the file of a checkpoint piece by piece (safetensors, with checksums).

`Writer` writes arrays to a file that replaces the old one only when `finish` is called. `TensorFile` reads arrays from
a file. `Reader` opens the checkpoint of a store, and checks that the file has everything that its header promises.

Checksums are CRC-32, in the metadata under `mpips.crc32`. The first checksum is that of the header. It covers the file
up to the first tensor, with zeros in place of the checksums themselves. Then follows a checksum for each tensor, in the
order of the file. Other programs see the checksums as one more metadata entry. They detect any flipped bit, and a
truncated file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 by name)
import msgspec
import numpy as np

from mpips.collectives.errors import warn
from mpips.collectives.files import NewFile
from mpips.store.keys.key import Array
from mpips.store.options import MOST

# metadata key of the store's header
STORE = "mpips.store"
# Version 2 added services, such as tables. A file without tables is still written as version 1.
VERSION = 2


class KeyRecord(msgspec.Struct):
    """A key in the header.

    Attributes:
        round: The round after which the key was saved.
        step: The number of times that the optimizer had updated the key.
        state: Dtypes of the optimizer's state arrays. Each array has as many elements as the key.
        optimizer: The key's own optimizer, as data. None if the key uses the default optimizer.
    """

    key: int | str
    shape: tuple[int, ...]
    dtype: str
    round: int
    step: int
    state: list[str]
    optimizer: dict[str, Any] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def floats(self) -> bool:
        """True if the elements are floats. Only float keys can have optimizers and compression."""
        return np.dtype(self.dtype).kind not in "iub"


class CollectionRecord(Protocol):
    """A collection of a service in the header (see `worker.interface.WorkerService`)."""

    @property
    def name(self) -> str: ...

    @property
    def noun(self) -> str:
        """The word for this kind of collection in error messages, such as "table"."""

    def check(self, path: str) -> None:
        """Raise ValueError with the file's path if the record has a number out of range or something unknown."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and types of the collection's tensors in the file."""


Decoder = Callable[[bytes], Sequence[CollectionRecord]]
NO_DECODERS: Mapping[str, Decoder] = {}


class StoreHeader(msgspec.Struct):
    """The header of a store's file.

    Attributes:
        kind, options: The kind and the options of the store that was saved. They inform people; no code reads them.
        optimizer: The default optimizer, as data, or None if the store had no default optimizer.
        residuals: Number of workers or clients that compressed their pushes. 0 if pushes were not compressed.
        services: Name of a service -> the records of its collections. In the file each name is a field of its own.
    """

    version: int
    kind: str
    options: dict[str, Any]
    records: list[KeyRecord]
    optimizer: dict[str, Any] | None
    compression: dict[str, Any] | None
    residuals: int
    services: dict[str, Sequence[Any]] = {}

    @property
    def collections(self) -> list[CollectionRecord]:
        """The records of the collections of all services."""
        return [record for records in self.services.values() for record in records]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and types of all tensors in the file."""
        for record in self.records:
            yield value_name(record.key), Tensor(np.dtype(record.dtype), record.shape)
            for slot, dtype in enumerate(record.state):
                yield state_name(record.key, slot), Tensor(np.dtype(dtype), (record.size,))
            for group in range(self.residuals if record.floats else 0):
                yield residual_name(record.key, group), Tensor(residual_dtype(record.dtype), (record.size,))
        for collection in self.collections:
            yield from collection.tensors()


def value_name(key: int | str) -> str:
    """Return the name of the tensor with a key's values."""
    return f"value/{key}"


def state_name(key: int | str, slot: int) -> str:
    """Return the name of the tensor with one state array of a key's optimizer."""
    return f"state{slot}/{key}"


def residual_name(key: int | str, group: int) -> str:
    """Return the name of the tensor with one worker's or client's residual of a key."""
    return f"residual{group}/{key}"


def residual_dtype(dtype: str) -> np.dtype:
    """Return the dtype in which residuals of a key are saved: float64 for keys of float64, float32 for others."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def file_name(what: str, argument: str, path: object) -> str:
    """Check an argument that names a file, and return it as a str.

    Raises TypeError or ValueError if the argument cannot be a file's name. The message names the call and the argument.
    """
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise TypeError(f"{what}: {argument} {path!r} is of type {type(path).__name__}: give a str or a Path")
    if not name:
        raise ValueError(f"{what}: {argument} is empty: give the name of a file")
    if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"{what}: {argument} {name!r} has a character that cannot be in it: choose another name")
    return name


def why(error: Exception) -> str:
    """Return the text of an error about a file, but without the file's name."""
    return getattr(error, "strerror", None) or str(error)


class Reader:
    """An open checkpoint of a store. It stays readable even if another file replaces it under the same path.

    The constructor raises ValueError if the file is not a checkpoint of a store, cannot be read, is damaged, or lacks
    something that its header promises.

    Args:
        decoders: See `decode_header`.
    """

    def __init__(self, path: str | os.PathLike[str], decoders: Mapping[str, Decoder] = NO_DECODERS) -> None:
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(TensorFile(path))
            self.path = self._file.path
            text = self._file.metadata.get(STORE)
            if text is None:
                raise ValueError(f"{self.path} was not written by save: it has no header of a store")
            try:
                # the header as bytes, in the form in which it is sent to other workers
                self.encoded = text.encode()
                self.header = decode_header(self.encoded, decoders)
            except (msgspec.MsgspecError, OverflowError, RecursionError) as error:
                raise ValueError(f"{self.path} cannot be read: {error}") from error
            self._check_header()
            self._check_tensors()
            self._file.check_sums((STORE,))
            stack.pop_all()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def get(self, name: str, rows: slice | None = None) -> Array:
        """Return a tensor, or some of its rows, as a writable array. Raises ValueError if the disk fails."""
        return self._file.get(name, rows)

    def _check_header(self) -> None:
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
        for collection in self.header.collections:
            collection.check(self.path)
            if collection.name in seen:
                raise ValueError(f"{self.path} names {collection.name!r} twice: save it anew")
            seen.add(collection.name)
        if not 0 <= self.header.residuals <= MOST:
            raise ValueError(f"{self.path} has {self.header.residuals} residuals: give a number in [0, 2**63)")
        if self.header.residuals and self.header.compression is None:
            raise ValueError(f"{self.path} has residuals, and no compression that kept them back: save it anew")

    def _check_tensors(self) -> None:
        for name, promised in self.header.tensors():
            if name not in self._file.tensors:
                raise ValueError(f"{self.path} has no tensor {name!r}, which its header promises: save it anew")
            if self._file.tensors[name] != promised:
                actual = f"{self._file.tensors[name]}, its header promises {promised}"
                raise ValueError(f"{self.path}: tensor {name!r} is {actual}: save anew")


def metadata(header: StoreHeader) -> dict[str, str]:
    """Encode the header as metadata of a safetensors file."""
    fields = msgspec.to_builtins(header)
    fields |= fields.pop("services")
    return {STORE: msgspec.json.encode(fields).decode()}


def decode_header(text: bytes, decoders: Mapping[str, Decoder]) -> StoreHeader:
    """Decode the header from metadata. Raise MsgspecError if the text is not a header.

    Args:
        decoders: Name of a service -> the function that decodes the service's field. Fields of services without a
            decoder are ignored.
    """
    fields = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    services = {name: decode(fields[name]) for name, decode in decoders.items() if name in fields}
    return msgspec.structs.replace(msgspec.json.decode(text, type=StoreHeader), services=services)


# every dtype that a file can hold, and its name in safetensors
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
DTYPES = {theirs: np.dtype(name) for name, theirs in NAMES.items()}

HOLDS = f"a checkpoint holds {', '.join(NAMES)}"

SUMS = "mpips.crc32"
# A header with checksums begins with these bytes. The digits of the checksums follow.
START = b'{"__metadata__": {"' + SUMS.encode() + b'": "'
DIGITS = 8
LENGTH_BYTES = 8
# The largest header that is read. Other programs have the same limit.
MOST_HEADER = 100_000_000
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
    """A file that is being written next to `path`. `finish` moves it to `path`.

    The constructor raises OSError if the file cannot be made, for example because `path` is a folder, a device or a
    pipe, or because its folder does not exist. `finish` raises errors that occurred while writing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = NewFile(path)
        self.path = self._file.path
        # the bytes of the header's length and of the header, with zeros in place of the checksums
        self._header = bytearray()
        self._places: dict[str, tuple[int, Tensor]] = {}
        # name of a tensor -> checksum of its elements written so far, in the order of the file
        self._sums: dict[str, int] = {}
        # name of a tensor -> number of its elements written so far
        self._written: dict[str, int] = {}
        self._failure: OSError | None = None

    def begin(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write the header. Call it once, before `write`.

        Raises ValueError for a dtype that the file format does not have.
        """
        words = {name: text for name, text in metadata.items() if name != SUMS}
        header: dict[str, Any] = {"__metadata__": {SUMS: "0" * DIGITS * (1 + len(tensors)), **words}}
        offset, offsets = 0, {}
        # Put tensors with larger elements first, so that every tensor is aligned in the file.
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
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
        """Write 1-D elements of a tensor, in its dtype. `start` must be the number of its elements written before."""
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
        """Move the file to its path. Blocks until the file is on disk, so that it survives a crash of the machine."""
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
        """Delete the unfinished file, and leave the old file at `path`. Does nothing once `finish` has begun."""
        self._file.abandon()

    def _put(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write data at an offset. If `data` is empty, set the length of the file to `offset`."""
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
    """Open a writer. Raises ValueError if the file cannot be made."""
    try:
        return Writer(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {why(error)}") from error


def write(path: str | os.PathLike[str], arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write arrays of any shapes and metadata to a file. Blocking. Raises OSError if the file cannot be written."""
    with contextlib.ExitStack() as stack:
        writer = Writer(path)
        stack.callback(writer.abandon)
        writer.begin({name: Tensor(array.dtype, array.shape) for name, array in arrays.items()}, metadata)
        for name, array in arrays.items():
            writer.write(name, 0, array)
        writer.finish()


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor in the header of safetensors."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class TensorFile:
    """An open safetensors file. It stays readable even if another file replaces it under the same path.

    The constructor raises ValueError if the file is not a safetensors file, cannot be read, or is damaged.

    Attributes:
        tensors: Name -> dtype and shape of each tensor, in the order of the file.
        metadata: The metadata of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.tensors: dict[str, Tensor] = {}
        self.metadata: dict[str, str] = {}
        # checksums of the tensors; None if the file has none, because another program or an older mpips wrote it
        self._sums: list[str] | None = None
        self._offsets: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            self._fd = self._opened()
            stack.callback(self.close)
            self._check_header(*self._header())
            stack.pop_all()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

    def check_sums(self, known: Collection[str], warns: bool = True) -> None:
        """Check the tensors against their checksums. Raises ValueError if one does not match.

        A file without checksums is accepted only if its metadata has no keys besides `known`. Older versions of mpips
        wrote such files.

        Args:
            warns: True to warn if the file has no checksums. Pass True on one rank only.
        """
        if self._sums is None and set(self.metadata) <= set(known):
            if warns:
                older = "has no checksums, as an older mpips wrote it"
                warn(f"{self.path} {older}: damage to it is not seen; save it anew")
            return
        if self._sums is None:
            raise self._damaged(f"its checksums are not where they belong (who writes it anew leaves out {SUMS!r})")
        buffer = memoryview(bytearray(min(PIECE_BYTES, max((t.nbytes for t in self.tensors.values()), default=0))))
        for (name, tensor), expected in zip(self.tensors.items(), self._sums):
            checksum, offset, left = 0, self._offsets[name], tensor.nbytes
            while left:
                piece = buffer[: min(left, len(buffer))]
                self._read(piece, offset)
                checksum, offset, left = zlib.crc32(piece, checksum), offset + len(piece), left - len(piece)
            if f"{checksum:0{DIGITS}x}" != expected:
                raise self._damaged(f"tensor {name!r} does not fit its checksum")

    def get(self, name: str, rows: slice | None = None) -> Array:
        """Return a tensor, or some of its rows, as a writable array.

        Raises ValueError if the file has no tensor of this name, or if the disk fails.
        """
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
        """Read the header. Return the header, and the number of bytes that follow it in the file."""
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

    def _check_header(self, text: bytes, size: int) -> None:
        """Parse the header. Raises ValueError if its tensors do not take exactly `size` bytes."""
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
        """Fill a buffer with the bytes at an offset. Raises ValueError if the disk fails or the file is too short."""
        left = buffer
        try:
            while len(left):
                count = os.preadv(self._fd, [left], offset)
                if not count:
                    raise self._unreadable("it was cut short")
                left, offset = left[count:], offset + count
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error
