"""A checkpoint of a store: what its header tells of keys, optimizers and compression, and how it is read."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from mpips.store.checkpoint.tensors import HOLDS, NAMES, Array, Tensor, TensorFile
from mpips.store.options import MOST

STORE = "mpips.store"
"""The word of the metadata that has the header."""
VERSION = 1


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

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def get(self, name: str) -> Array:
        """A tensor, writable. ValueError where the disk does not give it."""
        return self._file.get(name)

    def _see_header(self) -> None:
        if self.header.version != VERSION:
            version = f"has version {self.header.version}, this program reads version {VERSION}"
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
        if not 0 <= self.header.residuals <= MOST:
            raise ValueError(f"{self.path} has {self.header.residuals} residuals: give a number in [0, 2**63)")
        if self.header.residuals and self.header.compression is None:
            raise ValueError(f"{self.path} has residuals, and no compression that kept them back: save it anew")

    def _see_tensors(self) -> None:
        for name, promised in self.header.tensors():
            if name not in self._file.tensors:
                raise ValueError(f"{self.path} has no tensor {name!r}, which its header promises: save it anew")
            if self._file.tensors[name] != promised:
                found = f"{self._file.tensors[name]}, its header promises {promised}"
                raise ValueError(f"{self.path}: tensor {name!r} is {found}: save anew")


def metadata(header: Header) -> dict[str, str]:
    """The header as safetensors' metadata."""
    return {STORE: msgspec.json.encode(header).decode()}
