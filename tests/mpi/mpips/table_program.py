"""A drawn program of tables, played by a worker who compares every call with serial dictionaries of rows, bit for bit.

Every rank draws the same calls from the seed, and each worker ids and gradients of its own. In asynchronous stores of
several workers each pushes to ids of its own alone, whose rows are those of a dictionary of its own. Or all push whole
numbers to the same ids, which add up in any order.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np

import mpips
from mpips.optimizers import Cosine, StepDecay
from mpips.tables import eviction
from mpips.tables.table import push_together
from tests.mpi.mpips.reference_table import UPDATES, ReferenceTable, ServingCopy
from tests.mpi.mpips.support import WORLD, failure

CALLS = {
    "push": 8,
    "pushpull": 3,
    "push_all": 2,
    "set": 2,
    "remove": 2,
    "exists": 2,
    "pull": 6,
    "pull_all": 3,
    "ipull": 4,
    "wait": 2,
    "stats": 3,
    "update_optimizer": 2,
    "save": 2,
    "load": 2,
    "export": 3,
    "save_store": 1,
    "load_store": 1,
    "push_key": 2,
    "make": 1,
    "misuse": 1,
    "recover": 0.7,
    "pause": 1,
}
EDGES = [0, -1, 1, 2**63 - 1, -(2**63), 2**62, -(2**40)]
IDS = np.array([*EDGES, *range(2, 30), *range(10**15, 10**17, 7 * 10**15), *range(-(10**9), 10**9, 10**6 - 1)])
COUNTS = [0, 1, 2, 6, 12, 40, 40, 300, 4000]
DIMS = [1, 2, 3, 5, 8, 9, 16, 33, 129, 200]


def thirds(dim: int) -> Callable[[Any], Any]:
    """A function that gives first values, as every process computes them."""

    def give(ids: Any) -> Any:
        return ids[:, None] % 1000 / 3 + np.arange(dim)

    give.__name__ = f"thirds{dim}"
    return mpips.register_init(give)


THIRDS = {dim: thirds(dim) for dim in DIMS}


def options_of(chosen: random.Random, kinds: list[str]) -> tuple[str, dict[str, Any]]:
    """A store that fits the job."""
    kind, servers = chosen.choice(kinds), chosen.randint(1, min(3, WORLD.size - 1))
    workers = WORLD.size - servers
    options: dict[str, Any] = {"servers": servers, "shared_memory": chosen.random() < 0.7, "timeout_seconds": 30}
    if kind.startswith("mpi"):
        options |= {"clients": chosen.randint(1, workers), "masters": chosen.choice(["one", "all"])}
    if kind.endswith("async"):
        bounds = {"staleness": chosen.randint(0, 3)}, {"quorum": 1, "grace_seconds": 0.01}, {}
        options |= chosen.choice(bounds)
    return kind, options


def life_of(chosen: random.Random, servers: int) -> dict[str, Any]:
    return {
        "admit": chosen.choice([None, None, mpips.seen(1, 4), mpips.seen(2), mpips.seen(3, 15), mpips.chance(0.4)]),
        "evict": chosen.choice([None, None, 1, 2, 4, 9]),
        "limit": (limit := chosen.choice([None, None, 3, 12, 60, 2000])),
        "evict_by": chosen.choice(["age", "count", "score"]) if limit else None,
        "evict_after": chosen.choice([None, None, 2, 9]),
    }


class Played:
    """A table, what it must hold, and what a program that serves has of it.

    `lanes`: how many dictionaries of rows that is. `whole`: all workers push whole numbers to the same ids."""

    def __init__(self, kv: mpips.KVStore, name: str, chosen: random.Random) -> None:
        self.name, self.lanes, self.whole = name, 1, False
        if kv.layout.asynchronous and kv.num_workers > 1:
            self.lanes, self.whole = kv.num_workers, chosen.random() < 0.3
        optimizer = chosen.choice(sorted(UPDATES))
        rate = chosen.choice([0.1, 0.037, 1, 0.0, Cosine(0.1, 7), StepDecay(0.1, 3)])
        if optimizer == "ftrl":
            rate = chosen.choice([0.1, 0.037, 1])
        self.numbers: dict[str, Any] = {"learning_rate": rate}
        if optimizer not in ("sgd", "ftrl") and chosen.random() < 0.3:
            self.numbers["epsilon"] = 1e-3
        if chosen.random() < 0.3:
            self.numbers["clipnorm"] = chosen.choice([0.5, 3])
        if chosen.random() < 0.3:
            self.numbers |= {"l1": 0.1, "l2": 0.2} if optimizer == "ftrl" else {"weight_decay": 0.1}
        life = life_of(chosen, kv.layout.num_servers)
        dim, dtype = chosen.choice(DIMS), chosen.choice(["float32", "float64", "float16", "bfloat16"])
        if "16" in dtype and self.lanes == 1 and chosen.random() < 0.5:
            life["rounding"] = "stochastic"
        inits = mpips.normal(0.1, 0.5), mpips.truncated_normal(), mpips.constant(-0.3), THIRDS[dim]
        init, seed = chosen.choice([*map(mpips.uniform, (0, 0.5, 3)), *inits]), chosen.choice([0, 3, -1, 2**70])
        if self.lanes > 1:  # what depends on the order of all pushes is left out
            rates = isinstance(rate, (int, float))
            self.numbers |= {} if rates else {"learning_rate": 0.1}
            life = {"admit": life["admit"] if life["admit"] == mpips.seen(2) else None}
        if self.whole:
            dtype = "float32"
            init, optimizer, life, self.numbers = mpips.uniform(0), "sgd", {}, {"learning_rate": 1}
        self.life = {word: value for word, value in life.items() if value is not None}
        self._kind = {"dim": dim, "dtype": dtype, "optimizer": optimizer, "seed": seed}, init
        self.models = [
            ReferenceTable(name, init=init, servers=kv.layout.num_servers, **self._kind[0], **self.life, **self.numbers)
            for _ in range(self.lanes)
        ]
        self.saved: dict[tuple[str, ...], Any] = {}
        """By files: a whole one, and increments to it."""

    def go_on(self, kv: mpips.KVStore) -> None:
        """Make the table, or claim it from what the store has loaded."""
        kind, init = self._kind
        with warnings.catch_warnings():  # a loaded table has the learning rate of the file
            warnings.simplefilter("ignore")
            self.table = kv.table(self.name, init=init, **kind, **self.life, **self.numbers)
        for model in self.models:
            model.servers, model.refused, model.evicted = kv.layout.num_servers, 0, []
            model.reasons, model.removed = [0, 0, 0], 0
        self.worker, self.pushes, self.copy = kv.rank, 0, ServingCopy()
        self.since: int | None = None
        self.last: tuple[tuple[str, ...], int] = (), 0
        """The files that the next increment goes on from, and since when."""

    def __repr__(self) -> str:
        return f"table {self.name!r} {self._kind} {self.life} {self.models[0].numbers}"

    @property
    def updates(self) -> int:
        return sum(model.updates for model in self.models)

    def batch(self, seed: list[int], worker: int) -> tuple[Any, ...]:
        """Ids of any shape and layout, gradients, and scores if the table needs them."""
        chosen = np.random.default_rng([*seed, worker])
        ids = self.ids(chosen, worker)
        shape = (*ids.shape, self.table.dim)
        scale = chosen.choice([0, 1e-3, 1, 1e4])
        if self.table.dtype == np.float16:  # sums of repeated ids travel as float16, too
            scale = min(scale, 1)
        gradients = chosen.standard_normal(shape) * scale
        if self.whole:
            gradients = -chosen.integers(0, 3, shape)
        scores = [chosen.integers(-3, 4, ids.shape).astype(float)] if self.models[0].by_score else []
        return ids, gradients.astype(self.table.dtype), *scores

    def ids(self, chosen: np.random.Generator, worker: int) -> Any:
        mine = IDS if self.lanes == 1 or self.whole else IDS[IDS % self.lanes == worker]
        pool = mine[: chosen.choice([20, 60, len(mine)])]
        ids = chosen.choice(pool, chosen.choice(COUNTS))
        shapes = [(-1,), (-1,)]
        shapes += [(2, -1), (3, -1, 1)] if len(ids) % 6 == 0 and len(ids) else [()] if len(ids) == 1 else []
        shapes += [] if len(ids) else [(0, 3), (2, 0)]
        ids = ids.reshape(shapes[chosen.integers(len(shapes))])
        match chosen.integers(4):
            case 0:
                ids = np.asfortranarray(ids)
            case 1 if ids.ndim:
                ids = np.repeat(ids, 2, axis=0)[::2]
            case 2:
                ids.flags.writeable = False
        return ids

    def push(self, batches: list[Any], who: set[int], now: int, call: str = "push") -> None:
        """What the dictionaries do when these workers have pushed."""
        self.pushes += self.worker in who
        for worker in who if self.lanes > 1 else ():
            getattr(self.models[worker], call)([batches[worker]], now)
        if self.lanes == 1:
            getattr(self.models[0], call)(batches, now)

    def pull(self, ids: Any) -> Any:
        """Rows after this worker's pushes; None where others' count, too."""
        if self.whole:
            return None
        return self.models[self.worker % self.lanes].pull(ids)

    def sums(self, ids: Any) -> Any:
        """Rows that all have pushed whole numbers to."""
        return sum(model.pull(ids) for model in self.models)


class Player:
    """One worker, who also knows what all others do. `seed`: all of a program follows from it."""

    def __init__(self, seed: int, folder: str) -> None:
        self.seed, self.folder, self.step, self.chosen = seed, folder, 0, random.Random(seed)
        self.played: list[Played] = []
        self.files: dict[str, Any] = {}
        self.key = 0.0

    def play(self, kv: mpips.KVStore, calls: int) -> None:
        """Make calls of a store that is new, or that has loaded all tables."""
        self.kv, self.own = kv, random.Random(self.seed * 100 + kv.rank)
        self.asynchronous = kv.layout.asynchronous and kv.num_workers > 1
        self.waits: list[tuple[Any, Any, Any, str]] = []
        self.writes: list[Any] = []
        self.version, self.rounds = -1, 0
        if not self.played:
            kv.init("key", np.zeros(300))
            kv.set_optimizer("sgd", learning_rate=1.0)
            self.make()
        else:
            for played in self.played:
                played.go_on(kv)
        for _ in range(calls):
            call = self.chosen.choices([*CALLS], [*CALLS.values()])[0]
            self.said = f"seed {self.seed}, step {self.step}, {kv.type} {kv.layout.options}: {call}"
            # A second passes with each step, and is sometimes taken back. The clocks of other workers do not count.
            self.now = 10**15 + (self.step - 5 * (self.step % 11 == 0)) * 10**6
            with mock.patch.object(eviction, "now", return_value=self.now if kv.rank == 0 else 10**17):
                getattr(self, call)()
            self.step += 1
        self.said = f"seed {self.seed}, end"
        self.rest()
        for played in self.played:
            self.stats(played)

    def rest(self) -> None:
        """Have no call under way."""
        while self.waits:
            self.wait()
        while self.writes:
            self.writes.pop().wait()

    def some(self) -> Played:
        return self.chosen.choice(self.played)

    def check(self, found: Any, expected: Any, what: object) -> None:
        """Compare rows, bit for bit; None: others' pushes count, too."""
        if expected is not None and found.tobytes() != expected.tobytes():
            wrong = np.argwhere(found != expected)
            values = [(place.tolist(), found[*place], expected[*place]) for place in wrong[:3]]
            raise AssertionError(f"{self.said}, {what}: {len(wrong)} values of {found.shape} differ, as {values}")

    # ---- calls of a table

    def make(self) -> None:
        if len(self.played) < 3:
            self.played.append(Played(self.kv, ["users", "ä/b c", "t"][len(self.played)], self.chosen))
            self.played[-1].go_on(self.kv)

    def batches(self, played: Played) -> list[Any]:
        seed = [self.seed, self.step, self.played.index(played)]
        return [played.batch(seed, worker) for worker in range(self.kv.num_workers)]

    def pushing(self) -> set[int]:
        """Who pushes: all, or in an asynchronous store some."""
        workers = range(self.kv.num_workers)
        if not self.asynchronous or self.kv.layout.options.staleness >= 0:
            return {*workers}
        return {worker for worker in workers if self.chosen.random() < 0.7}

    def push(self) -> None:
        played, who = self.some(), self.pushing()
        batches = self.batches(played)
        if self.kv.rank in who:
            played.table.push(*batches[self.kv.rank])
            batches[self.kv.rank][1][...] = 99  # is the caller's again
        batches = self.batches(played)
        played.push(batches, who, self.now)

    def set(self) -> None:
        self.by_order("set", lambda table, ids, *rows: table.set(ids, *rows))

    def remove(self) -> None:
        self.by_order("remove", lambda table, ids: table.remove(ids))

    def by_order(self, call: str, make: Callable[..., None]) -> None:
        played, who = self.some(), self.pushing()
        if not played.whole:  # what others do to these ids would count in any order
            batches = [batch[:1] if call == "remove" else batch for batch in self.batches(played)]
            if self.kv.rank in who:
                make(played.table, *batches[self.kv.rank])
            played.push([batch[0] for batch in batches] if call == "remove" else batches, who, self.now, call)

    def exists(self) -> None:
        played = self.some()
        for _ in range(self.own.randrange(3)):
            ids = self.wanted(played)
            found, rows = played.table.exists(ids), played.models[self.kv.rank % played.lanes].rows
            expected = [one in rows for one in ids.reshape(-1).tolist()]
            assert found.shape == ids.shape, self.said
            assert played.whole or found.reshape(-1).tolist() == expected, f"{self.said}, {played}"

    def pushpull(self) -> None:
        played, who = self.some(), self.pushing()
        batches = self.batches(played)
        played.push(batches, who, self.now)
        if self.kv.rank in who:
            ids, gradients, *scores = batches[self.kv.rank]
            out = np.full_like(gradients, np.nan) if self.own.random() < 0.5 else None
            found = played.table.pushpull(ids, gradients, out, *scores)
            assert out is None or found is out, self.said
            self.check(found, played.pull(ids), played)

    def push_all(self) -> None:
        """Each worker pushes to all tables in its own order, or together."""
        who, together = self.pushing(), self.chosen.random() < 0.5
        together &= not any(played.models[0].by_score for played in self.played)
        batches = [self.batches(played) for played in self.played]
        mine = [(one.table, *some[self.kv.rank]) for one, some in zip(self.played, batches)]
        if self.kv.rank in who and together:
            push_together(mine)
        elif self.kv.rank in who:
            staying = self.kv.layout.options.staleness >= 0  # who is ahead in one table waits for those behind
            for table, *push in mine if staying else self.own.sample(mine, len(mine)):
                table.push(*push)
        for played, some in zip(self.played, batches):
            played.push(some, who, self.now)

    def wanted(self, played: Played) -> Any:
        return played.ids(np.random.default_rng(self.own.randrange(2**32)), self.kv.rank)

    def pull(self) -> None:
        played = self.some()
        for _ in range(self.own.randrange(3)):
            ids = self.wanted(played)
            out = np.full((*ids.shape, played.table.dim), np.nan, played.table.dtype)
            found = played.table.pull(ids, out) if self.own.random() < 0.5 else played.table.pull(ids)
            self.check(found, played.pull(ids), played)
            least = played.models[self.kv.rank % played.lanes].pull(ids)
            assert not played.whole or (found >= least).all(), f"{self.said}: own pushes are missing"

    def pull_all(self) -> None:
        """Each worker pulls from some tables together."""
        some = self.own.sample(self.played, self.own.randint(1, len(self.played)))
        wanted = {played.table: self.wanted(played) for played in some}
        found = mpips.pull_rows(wanted)
        for played in some:
            self.check(found[played.table], played.pull(wanted[played.table]), played)

    def ipull(self) -> None:
        played = self.some()
        for _ in range(self.own.randrange(3)):
            ids = self.wanted(played)
            out = np.full((*ids.shape, played.table.dim), np.nan, played.table.dtype)
            out = out if self.own.random() < 0.5 else None
            self.waits.append((played.table.ipull(ids, out), out, played.pull(ids), self.said))

    def wait(self) -> None:
        if self.waits:
            handle, out, expected, said = self.waits.pop(self.own.randrange(len(self.waits)))
            found = handle.wait()
            assert out is None or found is out, said
            self.check(found, expected, said)

    def stats(self, played: Played | None = None) -> None:
        """Compare all that others see, too, once all workers are here."""
        played = played or self.some()
        if self.asynchronous:
            self.kv.barrier()
            self.see_key()
        stats, models = played.table.stats(), played.models
        expected = {
            "rows": sum(len(model.rows) for model in models),
            "updates": played.updates,
            "evicted": sum(len(model.evicted) for model in models),
            "evicted_unused": sum(model.reasons[0] for model in models),
            "evicted_by_time": sum(model.reasons[1] for model in models),
            "evicted_by_limit": sum(model.reasons[2] for model in models),
            "removed": sum(model.removed for model in models),
            "refused": sum(model.refused for model in models),
            "counted": sum(len(model.counts) for model in models),
        }
        if played.whole:
            expected["rows"] = len({one for model in models for one in model.rows})
            self.check(played.table.pull(IDS), played.sums(IDS).astype(played.table.dtype), played)
        found = {word: stats[word] for word in expected}
        assert found == expected, f"{self.said}: table {played.name}: {found}, not {expected}"
        assert played.table.pushes == played.pushes, f"{self.said}: {played.table.pushes} pushes, not {played.pushes}"
        self.check(mine := played.table.pull(IDS), played.pull(IDS) if played.lanes == 1 else None, played)
        assert mine.shape == (len(IDS), played.table.dim)
        if self.asynchronous:
            self.kv.barrier()

    def update_optimizer(self) -> None:
        played = self.some()
        if not played.whole:
            number = self.chosen.choice([0.1, 0.01, 0.5])
            numbers = {"l2" if played._kind[0]["optimizer"] == "ftrl" else "learning_rate": number}
            played.table.update_optimizer(**numbers)
            for model in played.models:
                model.numbers |= numbers

    def save(self) -> None:
        played = self.some()
        path = f"{self.folder}/{played.name.replace('/', '-')}-{self.chosen.randrange(3)}"
        files, since = played.last
        if files and self.chosen.random() < 0.7:
            files = *files, f"{files[0]}-{self.step}"
        else:
            files, since = (path,), 0
            played.saved = {ones: state for ones, state in played.saved.items() if path not in ones}
        played.last = files, played.table.save(files[-1], since or None)
        assert played.last[1] == played.updates, f"{self.said}: {played.last}, not {played.updates}"
        played.saved[files] = [model.save() for model in played.models]

    def load(self) -> None:
        played = self.some()
        if played.saved:
            files = self.chosen.choice(sorted(played.saved))
            played.table.load(*files)
            self.restore(played, played.saved[files])

    def restore(self, played: Played, saved: Any) -> None:
        for model, one in zip(played.models, saved, strict=True):
            model.load(one)
        self.refuse_increment(played)

    def refuse_increment(self, played: Played) -> None:
        """The rows have become others than by updates."""
        if played.since:
            said = failure(lambda: played.table.export(f"{self.folder}/none", played.since))
            assert "no file of these rows was written then" in said, f"{self.said}: {said}"
        played.since, played.last = None, ((), 0)

    def export(self) -> None:
        played, path = self.some(), f"{self.folder}/export-{self.step}"
        since = None if self.chosen.random() < 0.2 else played.since
        played.since = played.table.export(path, since)
        assert played.since == played.updates, f"{self.said}: {played.since}, not {played.updates}"
        played.copy.read(path)
        if not played.whole:
            played.copy.check(*played.models)
        else:
            there = np.array([*played.copy.rows], np.int64)
            values = np.array([*played.copy.rows.values()]).reshape(len(there), played.table.dim)
            assert (values == played.sums(there)).all(), self.said

    # ---- calls of the store

    def save_store(self) -> None:
        path = f"{self.folder}/store-{self.chosen.randrange(2)}"
        saving = self.kv.save(path, wait=self.chosen.random() < 0.5)
        if saving is not None:
            self.writes.append(saving)
        self.files[path] = self.key, {one.name: [model.save() for model in one.models] for one in self.played}

    def load_store(self) -> None:
        for path, (key, saved) in self.files.items():
            if {*saved} != {one.name for one in self.played}:
                said = failure(lambda: self.kv.load(path))  # noqa: B023
                assert "has no table" in said, f"{self.said}: {said}"
            else:
                self.kv.load(path)
                self.key = key
                for played in self.played:
                    self.restore(played, saved[played.name])
                self.version = -1
                return

    def push_key(self) -> None:
        """All push to the key; a synchronous store has the sum, and says at which round."""
        out, workers = np.zeros(300), self.kv.num_workers
        self.kv.push("key", np.full(300, -1.0 - self.kv.rank))
        self.key, self.rounds = self.key + workers * (workers + 1) / 2, self.rounds + 1
        if not self.asynchronous:
            for _ in range(2):
                self.version = self.kv.pull("key", out, newer_than=self.version)
                assert (out == self.key).all(), f"{self.said}: {out[0]}, not {self.key}"
                assert self.version == self.rounds, f"{self.said}: version {self.version}, not {self.rounds}"

    def see_key(self) -> None:
        """Compare what all have pushed to the key; a quorum takes means."""
        out = np.zeros(300)
        self.kv.pull("key", out)
        assert self.kv.layout.options.quorum > 0 or (out == self.key).all(), f"{self.said}: {out[0]}, not {self.key}"

    def pause(self) -> None:
        """One worker is late."""
        if self.chosen.randrange(self.kv.num_workers) == self.kv.rank:
            time.sleep(0.003)

    def recover(self) -> None:
        self.rest()
        self.kv.barrier()
        rounds = self.kv.recover()
        self.version = -1
        for played in self.played:
            assert rounds[played.name] == played.pushes and not rounds.torn, self.said
            self.refuse_increment(played)

    def misuse(self) -> None:
        """One worker's arguments are bad, or those of all: nothing changes."""
        table, ids = self.some().table, np.arange(3)
        good = np.ones((3, table.dim), table.dtype)
        if self.chosen.randrange(self.kv.num_workers) == self.kv.rank:
            assert "need int64" in failure(lambda: table.pull(ids.astype(np.int32)))
            assert "has shape" in failure(lambda: table.push(ids[:2], good))
            assert "pass numpy.array" in failure(lambda: table.ipull([1]))
        assert "no argument momentum" in failure(lambda: table.update_optimizer(momentum=0.5))
        assert "none" in failure(lambda: table.load(f"{self.folder}/none"))
