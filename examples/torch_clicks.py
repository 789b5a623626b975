"""Predict clicks on advertisements with a network like DLRM. Its embeddings are rows of a table on servers.

mpips run -w 4 -s 2 examples/torch_clicks.py
mpips run -w 4 -s 2 examples/torch_clicks.py --kind dist_async

The data are random. An impression (an advertisement that is shown once) has 6 features, each one of ten million ids; a
bag of ids, the pages that the user has seen before; and 4 numbers. Ids follow a power law. Whether the user clicks
depends on all of these through hidden weights, which the network has to learn.
"""

import argparse
import time
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import mpips
import mpips.torch

FEATURES, NUMBERS, SEEN, IDS = 6, 4, 5, 10_000_000


class Batch(NamedTuple):
    """n impressions."""

    # (n, FEATURES)
    ids: Tensor
    # ids of pages seen before, of all impressions. The ids of impression k begin at offsets[k].
    pages: Tensor
    offsets: Tensor
    # (n, NUMBERS)
    numbers: Tensor
    # (n,), 0 or 1
    clicks: Tensor


def hidden(ids: np.ndarray) -> np.ndarray:
    """Return the hidden weight of an id, in [-1, 1): it is added to the log odds of a click."""
    return ((ids * 0x9E3779B1) % 65536) / 32768 - 1


def batch(seed: int, size: int, exponent: float) -> Batch:
    """Return `size` random impressions."""
    random = np.random.default_rng(seed)
    # All features share one table, so each feature has its own range of ids.
    ids = random.zipf(exponent, (size, FEATURES)) % IDS + np.arange(FEATURES) * IDS
    counts = random.integers(0, SEEN + 1, size)
    offsets = np.cumsum(counts) - counts
    # The ids of pages are negative, and so different from the ids of features.
    pages = random.zipf(exponent, counts.sum()) % IDS - IDS
    numbers = random.standard_normal((size, NUMBERS)).astype(np.float32)
    odds = hidden(ids).sum(1) + numbers[:, 0] * numbers[:, 1] - 1
    odds += np.bincount(np.repeat(np.arange(size), counts), hidden(pages), size)
    clicks = (random.random(size) < 1 / (1 + np.exp(-odds))).astype(np.float32)
    return Batch(*(torch.from_numpy(array) for array in (ids, pages, offsets, numbers, clicks)))


def layers(*widths: int) -> nn.Sequential:
    """Return linear layers with a ReLU between them."""
    pairs = [(nn.Linear(inputs, outputs), nn.ReLU()) for inputs, outputs in pairwise(widths)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1])


class Clicks(nn.Module):
    """A network like DLRM (arXiv:1906.00091).

    Its parts are the embeddings, and the output of dense layers whose input is the numbers. The parts, and the products
    of all pairs of parts, are the input of further layers.
    """

    def __init__(self, table: mpips.Table) -> None:
        super().__init__()
        self.features = mpips.torch.Embedding(table)
        self.seen = mpips.torch.EmbeddingBag(table, mode="sum")
        self.bottom = layers(NUMBERS, 32, table.dim)
        parts = FEATURES + 2
        self.pairs = torch.triu_indices(parts, parts, offset=1)
        self.top = layers(parts * table.dim + self.pairs.shape[1], 64, 1)

    def forward(self, ids: Tensor, pages: Tensor, offsets: Tensor, numbers: Tensor) -> Tensor:
        dense = self.bottom(numbers)[:, None]
        parts = torch.cat([dense, self.features(ids), self.seen(pages, offsets)[:, None]], dim=1)
        products = (parts @ parts.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([parts.flatten(1), products], dim=1))[:, 0]


def area(scores: Tensor, clicks: Tensor) -> float:
    """Return the area under the ROC curve: how often an impression with a click scores above one without."""
    ranks = scores.argsort().argsort().double() + 1
    ones = clicks.sum().double()
    return float((ranks[clicks > 0].sum() - ones * (ones + 1) / 2) / (ones * (len(clicks) - ones)))


def main(kind: str, steps: int, size: int, dim: int, exponent: float) -> float:
    """Train, and return the area under the ROC curve for test impressions."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Servers stay in this call until the workers have closed the store.
    kv = mpips.create(kind)
    table = kv.table("ids", dim, init=mpips.uniform(0.05), optimizer="row_adagrad", learning_rate=0.05)
    net = Clicks(table)
    forward = mpips.torch.DataParallel(net)
    rows, dense = mpips.torch.TableOptimizer(net), torch.optim.Adam(net.parameters(), lr=0.003)
    start, result, test = time.perf_counter(), 0.5, batch(0, 8192, exponent)
    following = batch(1 + kv.rank, size, exponent)
    for step in range(1, steps + 1):
        current = following
        rows.zero_grad()
        dense.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(forward(*current[:-1]), current.clicks)
        loss.backward()
        rows.step()
        following = batch(1 + kv.rank + step * kv.num_workers, size, exponent)
        # The rows of the next batch are fetched while the dense layers are updated.
        net.features.prefetch(following.ids)
        net.seen.prefetch(following.pages)
        dense.step()
        if step % 50 == 0 or step == steps:
            with torch.no_grad():
                result = area(net(*test[:-1]), test.clicks)
            if kv.rank == 0:
                seconds = time.perf_counter() - start
                print(f"step {step}: area {result:.4f}, {table.rows} rows, {seconds:.1f} s", flush=True)
    kv.close()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn to predict clicks, from random impressions.")
    parser.add_argument("--kind", choices=("dist_sync", "dist_async"), default="dist_sync")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=1024, help="of each worker")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--exponent", type=float, default=1.2, help="of the power law of ids, above 1")
    options = parser.parse_args()
    main(options.kind, options.steps, options.batch_size, options.dim, options.exponent)
