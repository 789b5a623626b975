"""Random calls on random stores, beside a model in NumPy that knows nothing of servers, clients or messages."""

from __future__ import annotations

import random

import numpy as np

import mpips
from tests.choice import first
from tests.mpi.mpips.support import WORLD, failure, run

SHAPES = [(1,), (7,), (40, 3), (1, 5), (1000,), (500, 30), (1200, 8), (9_999,)]
STEPS = 20


def options_of(chosen: random.Random) -> tuple[str, dict]:
    """A synchronous store that fits the job, with limits that cut arrays in many ways."""
    kind = chosen.choice(["dist_sync", "mpi_sync"])
    servers = chosen.choice([number for number in (0, 1, 2, 3) if number < WORLD.size])
    workers = WORLD.size - servers
    options = {
        "servers": servers,
        "shared_memory": chosen.random() < 0.4,
        "masters": chosen.choice(["one", "all"]),
        "clients": chosen.randint(1, min(3, workers)) if kind == "mpi_sync" else 1,
        "big_array": chosen.choice([10, 1000, 10**6]),
        "block_bytes": chosen.choice([4096, 2**20]),
        "chunk_bytes": chosen.choice([4096, 2**18]),
        "chunks_in_flight": chosen.choice([1, 8]),
        "small_bytes": chosen.choice([0, 32_768]),
    }
    return kind, options


class Player:
    """One worker, who also knows what all others do."""

    def __init__(self, kv, chosen: random.Random) -> None:
        self.kv, self.chosen = kv, chosen
        self.descends = chosen.random() < 0.5
        self.model: dict[str, np.ndarray] = {}
        for number in range(3):
            value = self.numbers(chosen.choice(SHAPES), chosen.choice(["float32", "float64"]))
            self.model[f"k{number}"] = value
        kv.init(list(self.model), list(self.model.values()))
        if self.descends:
            kv.set_optimizer("sgd", learning_rate=1.0)

    def numbers(self, shape, dtype):
        return np.random.default_rng(self.chosen.randrange(2**30)).integers(-4, 5, shape).astype(dtype)

    def pushes(self, names):
        """What every worker pushes of every key: arrays, or rows of those that have rows; drawn the same everywhere."""
        mixed = self.kv.type == "dist_sync" and self.kv.layout.num_servers > 0  # workers that sum together do the same
        made = [{} for _ in range(self.kv.num_workers)]
        for name in names:
            table = self.model[name]
            rows = table.ndim == 2 and self.chosen.random() < 0.5
            for values in made:
                if rows and not (mixed and self.chosen.random() < 0.3):
                    values[name] = self.some_rows(table)
                else:
                    values[name] = self.numbers(table.shape, table.dtype)
        return made

    def some_rows(self, table):
        """In order, or in any order and repeated."""
        count = self.chosen.randint(0, 300)
        rows = np.random.default_rng(self.chosen.randrange(2**30)).integers(0, len(table), count)
        rows = np.unique(rows) if self.chosen.random() < 0.5 else rows
        return mpips.RowSparse(rows, self.numbers((len(rows), table.shape[1]), table.dtype), table.shape)

    def step(self) -> None:
        names = self.chosen.sample(sorted(self.model), self.chosen.randint(1, 3))
        everyone = self.pushes(names)
        mine = [everyone[self.kv.rank][name] for name in names]
        outs = [np.empty_like(self.model[name]) for name in names]
        wrong = self.kv.num_workers - 1 if self.chosen.random() < 0.2 else -1
        way = self.chosen.choice(["push", "pushpull", "ipushpull"])
        if wrong == self.kv.rank:  # a bad argument is this worker's own affair
            bad = [*mine[:-1], np.ones(self.model[names[-1]].size + 1)]
            said = failure(lambda: self.call(way, names, bad, outs))
            assert "was initialised as" in said, (way, names, said)
        self.call(way, names, mine, outs)
        for name, out in zip(names, outs):
            total = sum(v.to_dense() if hasattr(v, "to_dense") else v for v in (one[name] for one in everyone))
            self.model[name] = self.model[name] - total if self.descends else total
            assert (out == self.model[name]).all(), (way, name, out.shape)

    def call(self, way, names, values, outs) -> None:
        if way == "push":
            self.kv.push(names, values, priority=3)
            self.kv.pull(names, outs)
        elif way == "pushpull":
            self.kv.pushpull(names, values, outs)
        else:
            self.kv.ipushpull(names, values, outs, priority=1).wait()


@first(3, seed=range(10))
def test_a_store_does_what_numpy_does(seed):
    kind, options = options_of(random.Random(100 * seed + WORLD.size))

    def body(kv):
        player = Player(kv, random.Random(seed))
        for _ in range(STEPS):
            player.step()

    run(kind, body, **options)
