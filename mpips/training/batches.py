"""Batches for training: from two arrays that the workers divide (`Arrays`), or from any iterable (`Batches`)."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mpips.samples import CURE, in_memory, table
from mpips.training.model import Samples

if TYPE_CHECKING:
    from mpips.store.api import KVStore

Batch = tuple[Samples, Samples]
# number of samples in one forward pass of an evaluation
BLOCK = 1024
# To check that their arrays are the same, workers compare this many rows of an array, and this many numbers of a row.
SHOWN_ROWS = 8
SHOWN_NUMBERS = 32
# seconds after which we warn that an iterable without a length may be endless
LONG_SECONDS = 10.0


def shares(samples: int, batch_size: int, epoch: int, seed: int, kv: KVStore, dealt: int = 0) -> Iterator[np.ndarray]:
    """Yield the indices (batch_size,) of the samples that this worker takes in each step of an epoch.

    All workers compute the same order of the samples from the seed and the epoch. In each step every worker takes the
    next `batch_size` samples of this order, worker after worker. The first `dealt` samples of the order are skipped.
    """
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    mini_batch = batch_size * kv.num_workers
    check_enough(samples, batch_size, kv.num_workers)
    for start in range(dealt + kv.rank * batch_size, samples - (samples - dealt) % mini_batch, mini_batch):
        yield order[start : start + batch_size]


def check_enough(samples: int, batch_size: int, workers: int) -> None:
    """Raise ValueError if there are too few samples for one step, in which each worker takes `batch_size` samples."""
    if batch_size * workers > samples:
        raise ValueError(
            f"batch_size={batch_size} on {workers} workers needs {batch_size * workers} samples a step, "
            f"but there are {samples}"
        )


@dataclass(frozen=True, eq=False)
class Arrays:
    """Batches that are cut from two arrays, x (samples, ...) and y (samples, ...).

    Every worker must pass the same two arrays and the same seed. Each epoch puts the samples in a new order, which is
    the same on every worker, and each worker takes its own share of them. All workers get the same number of batches.
    """

    x: Samples
    y: Samples
    batch_size: int
    seed: int = 0

    # True if workers may have different numbers of batches
    uneven: ClassVar[bool] = False
    # True if each epoch is known to have an end, unlike an endless stream
    bounded: ClassVar[bool] = True

    def order(self, workers: int) -> str:
        """Return a text that describes which samples come in which step. Equal texts mean equal steps."""
        return f"{len(self.x)} samples, {self.batch_size * workers} a step, seed {self.seed}"

    def steps(self, workers: int) -> int:
        """Return the number of batches that a worker has in an epoch."""
        return len(self.x) // (self.batch_size * workers)

    def epoch(self, number: int, kv: KVStore, skip: int = 0, dealt: int = 0) -> Iterator[Batch]:
        """Yield this worker's batches of an epoch.

        Args:
            number: The number of the epoch, from 1.
            kv: The store. It gives this worker's rank and the number of workers.
            skip: The number of batches to leave out, because they were taken before a resume.
            dealt: The number of samples of this epoch that had been used when the number of workers last changed.
        """
        every = itertools.islice(shares(len(self.x), self.batch_size, number, self.seed, kv, dealt), skip, None)
        return ((self.x[rows], self.y[rows]) for rows in every)


@dataclass(frozen=True, eq=False)
class Batches:
    """This worker's own batches (x, y). Workers may have different numbers of batches, and batches of different sizes.

    `source` is an iterable that can be iterated in every epoch, or a function that takes the number of the epoch (from
    1) and returns an iterable.
    """

    source: Iterable[Batch] | Callable[[int], Iterable[Batch]]
    # largest number of batches in an epoch; None means all that the source has
    most: int | None = None

    # True if workers may have different numbers of batches
    uneven: ClassVar[bool] = True

    def order(self, workers: int) -> str:
        """Return a text that describes which samples come in which step. For an iterable it only names the workers."""
        return f"batches of an iterable on each of {workers} workers"

    def steps(self, workers: int) -> int | None:
        """Return the largest number of batches that a worker may have in an epoch, or None if it is not known."""
        return self.most

    @property
    def bounded(self) -> bool:
        """True if each epoch is known to have an end, unlike an endless stream."""
        return self.most is not None or _has_length(self.source)

    def epoch(self, number: int, kv: KVStore | None = None, skip: int = 0, dealt: int = 0) -> Iterator[Batch]:
        """Yield this worker's batches of an epoch without the first `skip` batches. `dealt` is ignored."""
        batches = self.source if isinstance(self.source, Iterable) else self.source(number)
        if not isinstance(batches, Iterable):
            raise TypeError(
                f"the function of the epoch returned a {type(batches).__name__}: it returns an iterable of batches "
                "(x, y)"
            )
        if self.most is None and not _has_length(batches):
            batches = _unmeasured(batches, kv)
        return itertools.islice(map(_pair, batches), skip, self.most)


Source = Arrays | Batches


def _has_length(batches: object) -> bool:
    try:
        return len(batches) >= 0  # type: ignore[arg-type]
    except TypeError:
        # PyTorch's loader of a stream has a __len__ that raises.
        return False


def _unmeasured(batches: Iterable[Any], kv: KVStore | None) -> Iterator[Any]:
    """Yield the batches of an iterable without a length.

    Warn once if they have not ended after `LONG_SECONDS`. In a synchronous store only rank 0 warns.
    """
    began, warned = time.monotonic(), kv is not None and kv.rank > 0 and not kv.layout.asynchronous
    for number, batch in enumerate(batches):
        if not warned and time.monotonic() - began > LONG_SECONDS:
            warned = True
            warnings.warn(
                f"batches of {type(batches).__name__}, which has no length, go on after {LONG_SECONDS:.0f} s "
                f"and {number:,} of them: where they never end, give fit(steps=...), the steps of an epoch, "
                "or cut them by itertools.islice",
                RuntimeWarning,
                stacklevel=2,
            )
        yield batch


def _pair(batch: object) -> Batch:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(
            f"a batch is a pair (x, y), not a {type(batch).__name__}"
            + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        )
    return batch[0], batch[1]


def source_of(
    x: Samples, y: Samples, batch_size: int | None, seed: int, what: str = "fit", most: int | None = None
) -> Source:
    """Return the source of batches for the arguments of `fit` or `evaluate`.

    Raises TypeError or ValueError if the arguments are neither two arrays nor batches.

    Args:
        what: The name of the call, for error messages.
        most: The largest number of batches in an epoch.
    """
    if y is None:
        _check_iterable(x, what)
        if batch_size is not None:
            raise TypeError(f"{what}: batch_size={batch_size} goes with arrays x and y; batches have their own sizes")
        return Batches(x, most)
    if most is not None:
        raise TypeError(f"{what}: steps= goes with batches: an epoch of arrays x and y ends with their last samples")
    x, y = paired("x and y", x, y)
    if batch_size is None:
        raise TypeError(f"{what}: give batch_size, the samples that a worker takes in a step, with arrays x and y")
    return Arrays(x, y, whole("batch_size", batch_size, 1), seed)


def whole(name: str, number: object, least: int) -> int:
    """Return a whole number as an int. A NumPy integer is also accepted.

    Raises TypeError for anything else, and ValueError for a number below `least`.
    """
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise TypeError(f"{name}={number!r}: give a whole number")
    if number < least:
        raise ValueError(f"{name}={number}: give at least {least}")
    return int(number)


def test_of(test: Any) -> Source | None:
    """Return the source of batches for `fit(test=)`, which is a pair of arrays, or batches, or None."""
    if test is None:
        return None
    if isinstance(test, tuple) and not (test and isinstance(test[0], (tuple, list))):
        if len(test) != 2:
            raise TypeError(f"test: give two arrays, inputs (samples, ...) and targets (samples, ...), not {len(test)}")
        return Arrays(*paired("test", *test), batch_size=BLOCK)
    _check_iterable(test, "test")
    return Batches(test)


def _check_iterable(batches: Any, what: str) -> None:
    if hasattr(batches, "shape"):
        raise TypeError(
            f"{what}: x is an array {tuple(batches.shape)} without y: give both, or an iterable of batches (x, y)"
        )
    known = isinstance(batches, Iterable) and not isinstance(batches, (str, bytes, dict))
    if not known and not callable(batches):
        raise TypeError(
            f"{what}: give arrays x and y, an iterable of batches (x, y), or a function of the epoch that "
            f"returns one, not a {type(batches).__name__}"
        )


def check_repeatable(source: Source, epochs: int, survives: bool = False) -> None:
    """Raise TypeError if the source is an iterator, which can be iterated only once, and this fit needs more.

    A fit needs more in two cases: if it has several epochs without a limit `most` (with a limit, an iterator continues
    in the next epoch), or if the store survives deaths, because a death may take the fit back to an earlier step.
    """
    if not isinstance(source, Batches) or not isinstance(source.source, Iterator):
        return
    if survives:
        raise TypeError(
            f"fit: batches is a {type(source.source).__name__}, which cannot go back to a step that a "
            "death has undone (spares): give a list, a loader, or a function of the epoch"
        )
    if epochs > 1 and source.most is None:
        raise TypeError(
            f"fit: batches is a {type(source.source).__name__}, which ends with its first epoch of "
            f"{epochs}: give a list, a loader, or a function of the epoch that returns such an iterator; "
            "or steps=, the steps of an epoch"
        )


def paired(name: str, x: Samples, y: Samples) -> tuple[Samples, Samples]:
    """Return x and y as tables that give rows by position.

    Raises TypeError or ValueError unless both are arrays with the same number of samples.
    """
    wrong = [type(array).__name__ for array in (x, y) if not hasattr(array, "shape") or not len(array.shape)]
    if wrong:
        raise TypeError(
            f"{name}: give two arrays, inputs (samples, ...) and targets (samples, ...), not {', '.join(wrong)}; {CURE}"
        )
    names = ("x", "y") if name == "x and y" else (f"{name} inputs", f"{name} targets")
    tables = tuple(table(*each) for each in zip(names, (x, y)))
    if len(tables[0]) != len(tables[1]):
        raise ValueError(f"{name}: {len(tables[0])} inputs, but {len(tables[1])} targets: give one for each sample")
    return tables


def check_samples(model: object, source: Source | None) -> None:
    """Call the model's `check_samples` with the arrays, if the model has this method."""
    check = getattr(model, "check_samples", None)
    if callable(check) and isinstance(source, Arrays):
        check(source.x, source.y)


def samples_shown(*sources: Source | None) -> np.ndarray:
    """Return a few numbers of each array, float64 (numbers,), by which workers check that their arrays are equal."""
    shown = [np.empty(0)]
    for source in sources:
        if isinstance(source, Arrays) and len(source.x):
            rows = np.unique(np.linspace(0, len(source.x) - 1, SHOWN_ROWS).astype(np.int64))
            # Arrays on a GPU cannot be converted.
            with contextlib.suppress(TypeError):
                for each in (source.x, source.y):
                    numbers = in_memory("x", each[rows]).reshape(len(rows), -1)[:, :SHOWN_NUMBERS]
                    shown.append(numbers.real.astype(np.float64).reshape(-1))
    return np.concatenate(shown)


def check_same_arrays(shown: Sequence[np.ndarray]) -> None:
    """Raise ValueError if the workers' arrays differ by more than rounding. `shown[r]` is `samples_shown` of rank r."""
    first = shown[0]
    for rank, other in enumerate(shown):
        # A worker whose arrays could not be converted has fewer numbers.
        if len(other) != len(first):
            continue
        alike = np.isclose(first, other, rtol=1e-3, atol=1e-6, equal_nan=True)
        if not alike.all():
            number = int(np.argmin(alike))
            raise ValueError(
                f"fit: the arrays differ between workers, as {first[number]:.6g} on rank 0 and "
                f"{other[number]:.6g} on rank {rank}: give all the same, shuffled by one seed, as each "
                "takes its share of them; or each its own as batches"
            )


def share_of(source: Source, number: int, rank: int, workers: int) -> Iterator[Batch]:
    """Return the part of a source that worker `rank` of `workers` evaluates, as batches.

    For arrays this is the worker's share of the rows, in blocks of `batch_size`. For batches it is all of the worker's
    own batches.
    """
    if isinstance(source, Batches):
        return source.epoch(number)
    samples = len(source.x)
    rows = range(samples * rank // workers, samples * (rank + 1) // workers)
    starts = range(rows.start, rows.stop, source.batch_size)
    blocks = (slice(start, min(start + source.batch_size, rows.stop)) for start in starts)
    return ((source.x[block], source.y[block]) for block in blocks)
