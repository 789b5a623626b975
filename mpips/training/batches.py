"""Where batches come from: arrays, of which every worker takes its share (`Arrays`), or any iterable (`Batches`)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from mpips.training.model import samples_of

Batch = tuple[Any, Any]
BLOCK = 1024
"""Samples that are evaluated at once."""


def shares(samples: int, batch_size: int, epoch: int, seed: int, kv: Any, dealt: int = 0) -> Iterator[np.ndarray]:
    """This worker's rows of every mini-batch of an epoch, behind the first `dealt` of its order: int arrays
    (batch_size,).

    `kv` says who this worker is: `rank` and `num_workers`.
    """
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    mini_batch = batch_size * kv.num_workers
    see_enough(samples, batch_size, kv.num_workers)
    for start in range(dealt + kv.rank * batch_size, samples - (samples - dealt) % mini_batch, mini_batch):
        yield order[start : start + batch_size]


def see_enough(samples: int, batch_size: int, workers: int) -> None:
    """ValueError where the samples do not fill one mini-batch of all workers."""
    if batch_size * workers > samples:
        raise ValueError(f"batch_size={batch_size} on {workers} workers needs {batch_size * workers} samples a step, "
                         f"but there are {samples}")


@dataclass(frozen=True, eq=False)
class Arrays:
    """Batches of two arrays, x (samples, ...) and y (samples, ...), the same on every worker.

    Every epoch is a new order of the samples, of which each worker takes its share: equally many batches.
    """

    x: Any
    y: Any
    batch_size: int
    seed: int = 0

    @property
    def joined(self) -> bool:
        """Whether workers may have unlike batches: never."""
        return False

    def order(self, workers: int) -> str:
        """What decides which samples come in which step."""
        return f"{len(self.x)} samples, {self.batch_size * workers} a step, seed {self.seed}"

    def steps(self, workers: int) -> int:
        """Batches of a worker in an epoch."""
        return len(self.x) // (self.batch_size * workers)

    def epoch(self, number: int, kv: Any, skip: int = 0, dealt: int = 0) -> Iterator[Batch]:
        """This worker's batches of an epoch, but for the first `skip`; of the samples behind the first `dealt`."""
        rows = itertools.islice(shares(len(self.x), self.batch_size, number, self.seed, kv, dealt), skip, None)
        return ((self.x[mine], self.y[mine]) for mine in rows)


@dataclass(frozen=True, eq=False)
class Batches:
    """This worker's own batches (x, y): an iterable that can be gone through in every epoch, or a function of the
    epoch's number, from 1, that returns one. Workers may have unlike numbers of batches, and of samples in them."""

    source: Iterable[Batch] | Callable[[int], Iterable[Batch]]

    @property
    def joined(self) -> bool:
        """Whether workers may have unlike batches: always."""
        return True

    def order(self, workers: int) -> str:
        """What decides which samples come in which step."""
        return f"batches of an iterable on each of {workers} workers"

    def steps(self, workers: int) -> int | None:
        """Nobody knows before."""
        return None

    def epoch(self, number: int, kv: Any = None, skip: int = 0, dealt: int = 0) -> Iterator[Batch]:
        """This worker's batches of an epoch, but for the first `skip`; `dealt` is of arrays."""
        found = self.source if isinstance(self.source, Iterable) else self.source(number)
        if not isinstance(found, Iterable):
            raise TypeError(f"the function of the epoch returned a {type(found).__name__}: it returns an iterable of "
                            "batches (x, y)")
        return itertools.islice((_pair(batch) for batch in found), skip, None)


Source = Arrays | Batches


def _pair(batch: Any) -> Batch:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(f"a batch is a pair (x, y), not a {type(batch).__name__}"
                        + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""))
    return batch[0], batch[1]


def source_of(x: Any, y: Any, batch_size: int | None, seed: int, what: str = "fit") -> Source:
    """The batches that `fit` or `evaluate` was given. TypeError or ValueError where they are none."""
    if y is None:
        _see_iterable(x, what)
        if batch_size is not None:
            raise TypeError(f"{what}: batch_size={batch_size} goes with arrays x and y; batches have their own sizes")
        return Batches(x)
    see_pair("x and y", x, y)
    if batch_size is None:
        raise TypeError(f"{what}: give batch_size, the samples that a worker takes in a step, with arrays x and y")
    return Arrays(x, y, whole("batch_size", batch_size, 1), seed)


def whole(name: str, number: Any, least: int) -> int:
    """A whole number, of NumPy, too; TypeError where it is none, ValueError where it is below `least`."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise TypeError(f"{name}={number!r}: give a whole number")
    if number < least:
        raise ValueError(f"{name}={number}: give at least {least}")
    return int(number)


def test_of(test: Any) -> Source | None:
    """What `fit(test=)` was given: a pair of arrays, or batches as of `fit`; None where it was nothing."""
    if test is None:
        return None
    if isinstance(test, tuple) and not (test and isinstance(test[0], (tuple, list))):
        if len(test) != 2:
            raise TypeError(f"test: give two arrays, inputs (samples, ...) and targets (samples, ...), not {len(test)}")
        see_pair("test", *test)
        return Arrays(*test, batch_size=BLOCK)
    _see_iterable(test, "test")
    return Batches(test)


def _see_iterable(batches: Any, what: str) -> None:
    if hasattr(batches, "shape"):
        raise TypeError(f"{what}: x is an array {tuple(batches.shape)} without y: give both, or an iterable of batches "
                        "(x, y)")
    if not isinstance(batches, Iterable) and not callable(batches):
        raise TypeError(f"{what}: give arrays x and y, an iterable of batches (x, y), or a function of the epoch that "
                        f"returns one, not a {type(batches).__name__}")


def see_again(source: Source, epochs: int, survives: bool = False) -> None:
    """TypeError where batches end with the first epoch, and there are more, or a death may take it back."""
    if not isinstance(source, Batches) or not isinstance(source.source, Iterator):
        return
    if survives:
        raise TypeError(f"fit: batches is a {type(source.source).__name__}, which cannot go back to a step that a "
                        "death has undone (spares): give a list, a loader, or a function of the epoch")
    if epochs > 1:
        raise TypeError(f"fit: batches is a {type(source.source).__name__}, which ends with its first epoch of "
                        f"{epochs}: give a list, a loader, or a function of the epoch that returns such an iterator")


def see_pair(name: str, x: Any, y: Any) -> None:
    """TypeError or ValueError where they are not two arrays of as many samples."""
    wrong = [type(array).__name__ for array in (x, y) if not hasattr(array, "shape") or not np.ndim(array)]
    if wrong:
        raise TypeError(f"{name}: give two arrays, inputs (samples, ...) and targets (samples, ...), "
                        f"not {', '.join(wrong)}")
    if len(x) != len(y):
        raise ValueError(f"{name}: {len(x)} inputs, but {len(y)} targets: give one for each sample")


def share_of(source: Source, number: int, rank: int, workers: int) -> Iterator[Batch]:
    """What one of `workers` evaluates: its rows of arrays, in blocks of `batch_size`, or all of its own batches."""
    if isinstance(source, Batches):
        return source.epoch(number)
    samples = len(source.x)
    rows = range(samples * rank // workers, samples * (rank + 1) // workers)
    starts = range(rows.start, rows.stop, source.batch_size)
    blocks = (slice(start, min(start + source.batch_size, rows.stop)) for start in starts)
    return ((source.x[block], source.y[block]) for block in blocks)


def counted(batches: Iterable[Batch]) -> Iterator[tuple[int, Any, Any]]:
    """Each batch behind its number of samples."""
    return ((samples_of(x, y), x, y) for x, y in batches)
