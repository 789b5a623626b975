"""A checkpoint's file: safetensors, written piece by piece, there whole or not at all; and how it is read."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (NumPy then knows bfloat16 by name)
import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from mpips.options import MOST

Array = NDArray[Any]

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip
"""Every dtype that a file can hold, and what safetensors calls it."""

HOLDS = f"a checkpoint holds {', '.join(NAMES)}"

VERSION = 1


class Tensor(NamedTuple):
    """What a file holds under a name."""

    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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


class Header(msgspec.Struct):
    """What a file says beside its tensors."""

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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All that the file holds, with its names."""
        for record in self.records:
            yield value_name(record.key), Tensor(np.dtype(record.dtype), record.shape)
            for slot, dtype in enumerate(record.state):
                yield state_name(record.key, slot), Tensor(np.dtype(dtype), (record.size,))
            for group in range(self.residuals if np.dtype(record.dtype).kind not in "iub" else 0):
                yield residual_name(record.key, group), Tensor(residual_dtype(record.dtype), (record.size,))


def value_name(key: int | str) -> str:
    """The tensor of a key's values."""
    return f"value/{key}"


def state_name(key: int | str, slot: int) -> str:
    """The tensor of one array of the optimizer's state of a key."""
    return f"state{slot}/{key}"


def residual_name(key: int | str, group: int) -> str:
    """The tensor of what one worker's or client's compression kept back of a key."""
    return f"residual{group}/{key}"


def residual_dtype(dtype: str) -> np.dtype:
    """In what compression keeps the rest of a key of this dtype: float32 for 16-bit floats."""
    return np.dtype(np.float64 if dtype == "float64" else np.float32)


def file_name(what: str, argument: str, path: Any) -> str:
    """The path as a str; TypeError or ValueError, which name call and argument, where no file can have that name."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not isinstance(name, str):
        raise TypeError(f"{what}: {argument} {path!r} is of type {type(path).__name__}: give a str or a Path")
    if not name:
        raise ValueError(f"{what}: {argument} is empty: give the name of a file")
    if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"{what}: {argument} {name!r} has a character that cannot be in it: choose another name")
    return name


def why(error: Exception) -> str:
    """What went wrong with a file, without its name."""
    return getattr(error, "strerror", None) or str(error)


def opened(path: str) -> Any:
    """A file of safetensors, to read. OSError or SafetensorError where it cannot be read."""
    if not os.path.exists(path):
        raise OSError("there is no such file")
    if not os.path.isfile(path):
        raise OSError("it is no regular file: give one that was saved")
    return safe_open(path, framework="numpy")


class Writer:
    """A file that is being written beside `path`, under the name `path`.part; `finish` puts it in place.

    Raises OSError where it cannot be made: `path` is a folder, a device or a pipe, or its folder is not there. What
    makes a later step fail, `finish` raises.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._unfinished = f"{self.path}.part"
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise OSError("it is there and no regular file: choose another name")
        _see_folder(os.path.dirname(self.path))
        self._file = os.open(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._places: dict[str, tuple[int, Tensor]] = {}
        self._failure: OSError | None = None
        self._finishing = False

    def begin(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        """Write the header; once, before `write`. ValueError where a dtype is none that the format knows."""
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset, offsets = 0, {}
        for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):  # aligned, then
            if tensor.dtype.name not in NAMES:
                raise ValueError(f"{name} is of {tensor.dtype.name}: {HOLDS}")
            offsets[name], end = offset, offset + tensor.nbytes
            header[name] = {
                "dtype": NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": [offset, end]
            }  # fmt: skip
            offset = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        base = 8 + len(text)
        self._put(b"", base + offset)
        self._put(len(text).to_bytes(8, "little") + text, 0)
        self._places = {name: (base + offsets[name], tensor) for name, tensor in tensors.items()}

    def write(self, name: str, start: int, values: Array) -> None:
        """Elements from `start` on of a tensor, flat, of its dtype."""
        place, tensor = self._places[name]
        assert values.dtype == tensor.dtype and start + values.size <= math.prod(tensor.shape), name
        if values.size:
            data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            self._put(data.data, place + start * tensor.dtype.itemsize)

    def finish(self) -> None:
        """Put the file in place, where it stays whatever happens to the machine. Blocks until the disk has it."""
        self._finishing = True
        try:
            if self._failure is not None:
                raise self._failure
            os.fsync(self._file)
            os.replace(self._unfinished, self.path)
        except OSError:
            self._remove()
            raise
        finally:
            os.close(self._file)
        folder = os.open(os.path.dirname(self.path) or ".", os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abandon(self) -> None:
        """Leave what was at `path` as it was. Once `finish` has begun: nothing."""
        if not self._finishing:
            self._finishing = True
            self._remove()
            os.close(self._file)

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._unfinished)

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        """Write at a place; nothing: let the file be so long."""
        left = memoryview(data)
        try:
            if not len(left):
                os.truncate(self._file, offset)
            while len(left) and self._failure is None:
                written = os.pwrite(self._file, left, offset)
                left, offset = left[written:], offset + written
        except OSError as error:
            self._failure = error


def _see_folder(folder: str) -> None:
    """OSError where it is not there, which says why."""
    above = folder
    while above and not os.path.lexists(above):
        above = os.path.dirname(above)
    if above and not os.path.isdir(above):
        raise OSError(f"{above} is no folder: choose another place")
    if above != folder:
        raise OSError(f"there is no folder {folder}: make it first")


def write(path: str | os.PathLike[str], arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write arrays of any shapes and a few words into one file. Blocking; OSError where it cannot be written."""
    with contextlib.ExitStack() as stack:
        writer = Writer(path)
        stack.callback(writer.abandon)
        writer.begin({name: Tensor(array.dtype, array.shape) for name, array in arrays.items()}, metadata)
        for name, array in arrays.items():
            writer.write(name, 0, array)
        writer.finish()


class Reader:
    """A checkpoint of a store that is open; whatever is put in its place meanwhile, this one is read.

    ValueError where it is none, cannot be read, or lacks something that its header promises.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._file = opened(self.path)
            text = (self._file.metadata() or {}).get("mpips.store")
            if text is None:
                raise ValueError(f"{self.path} was not written by save: it has no header of a store")
            self.header = msgspec.json.decode(text, type=Header)
        except (OSError, SafetensorError, msgspec.MsgspecError) as error:
            raise ValueError(f"{self.path} cannot be read: {why(error)}") from error
        if self.header.version != VERSION:
            version = f"has version {self.header.version}, this program reads version {VERSION}"
            raise ValueError(f"{self.path} {version}: use a newer one")
        self._see_records()
        self._see_tensors()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def get(self, name: str) -> Array:
        """A tensor, writable. ValueError where the disk does not give it."""
        try:
            return np.array(self._file.get_tensor(name), copy=None)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{self.path} cannot be read: {why(error)}") from error

    def _see_records(self) -> None:
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
        if self.header.residuals and self.header.compression is None:
            raise ValueError(f"{self.path} has residuals, and no compression that kept them back: save it anew")

    def _see_tensors(self) -> None:
        there = set(self._file.keys())
        for name, tensor in self.header.tensors():
            if name not in there:
                raise ValueError(f"{self.path} has no tensor {name!r}, which its header promises: save it anew")
            part = self._file.get_slice(name)
            found = f"{part.get_dtype()}{tuple(part.get_shape())}"
            promised = f"{NAMES[tensor.dtype.name]}{tuple(tensor.shape)}"
            if found != promised:
                raise ValueError(f"{self.path}: tensor {name!r} is {found}, its header promises {promised}: save anew")


def metadata(header: Header) -> dict[str, str]:
    """The header as safetensors' metadata."""
    return {"mpips.store": msgspec.json.encode(header).decode()}
