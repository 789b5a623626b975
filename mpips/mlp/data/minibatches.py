"""Which rows each batch index needs, in the order it uses them: the same minibatches on every mesh.

Rows are dealt once: a permutation by the seed, its first part for testing, the rest cut into minibatches; a minibatch
is cut into one slice for each batch index. A rank so needs, and keeps, only its slices, one behind the other, and a
step reads a contiguous block of them. Epochs visit the minibatches in a new order, not with new members, so that no
row moves between ranks during training.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpips.mlp.intervals import interval


class Rule(NamedTuple):
    """By what rows are dealt: the same seed and share (of a file's rows, for testing) give the same test rows."""

    seed: int
    test_share: float
    batch: int


class Deal(NamedTuple):
    """What one batch index holds. Its slice of minibatch k is ``train[bounds[k]:bounds[k + 1]]``, maybe empty."""

    train: np.ndarray  # row numbers, (own training rows,)
    bounds: np.ndarray  # (minibatches + 1,)
    samples: np.ndarray  # samples of each whole minibatch, (minibatches,)
    test: np.ndarray  # row numbers, (own test rows,)


def deal(rows: int, test_rows: int, batch: int, parts: int, index: int, seed: int) -> Deal:
    """The rows of batch index `index` of `parts`: minibatches of `batch` samples, the last one perhaps smaller."""
    order = np.random.default_rng([seed, 0]).permutation(rows)
    test, train = order[:test_rows], order[test_rows:]
    starts = np.arange(0, len(train), batch)
    samples = np.minimum(len(train) - starts, batch)
    slices = [interval(int(count), parts, index) for count in samples]
    bounds = np.concatenate([[0], np.cumsum([stop - start for start, stop in slices], dtype=np.int64)])
    own = [train[first + start : first + stop] for first, (start, stop) in zip(starts, slices)]
    return Deal(np.concatenate([train[:0], *own]), bounds, samples, test[slice(*interval(test_rows, parts, index))])


def order(minibatches: int, epoch: int, seed: int) -> np.ndarray:
    """The order in which an epoch (from 0) visits the minibatches."""
    return np.random.default_rng([seed, 1, epoch]).permutation(minibatches)
