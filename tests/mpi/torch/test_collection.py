"""A collection of pooled bags trains as PyTorch's `EmbeddingBag`s do, and as ours do one by one, by one pull."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mpips
import mpips.torch
import mpips.torch.collection
from tests import child
from tests.mpi.mpips.killed import HINDRANCE, ROOT
from tests.mpi.mpips.support import need, run
from tests.mpi.sizes import JOB_LIMIT
from tests.mpi.torch.support import WORLD, heard

ROWS, STEPS = 12, 5
# feature -> name of its table, dim, mode; "seen" and "liked" share a table
FEATURES = {
    "user": ("users", 4, "sum"),
    "seen": ("items", 3, "mean"),
    "liked": ("items", 3, "sum"),
    "tags": ("tags", 2, "mean"),
}
DIMS = {table: dim for table, dim, _ in FEATURES.values()}
MODES = {feature: mode for feature, (_, _, mode) in FEATURES.items()}
Batch = tuple[dict[str, Tensor], dict[str, Tensor]]
served = pytest.mark.skipif(WORLD.size == 1, reason="tables need a server")


def batch(step: int, worker: int, bags: int = 5) -> Batch:
    """Ids and offsets of each feature: repeated ids, empty bags, and in some steps a worker without any id."""
    random = np.random.default_rng([step, worker])
    ids, offsets = {}, {}
    for feature in FEATURES:
        lengths = random.integers(0, 4, bags) * (random.random(bags) < 0.7)
        if (step + worker) % 4 == 3:
            lengths[:] = 0
        ids[feature] = torch.from_numpy(random.integers(0, ROWS, lengths.sum()))
        offsets[feature] = torch.from_numpy(np.cumsum(lengths) - lengths)
    return ids, offsets


def tables_of(kv: mpips.KVStore, more: str = "", bound: float = 0.5) -> dict[str, mpips.Table]:
    """A table for each feature. `more` makes names of other tables."""
    made = {
        name: kv.table(name + more, dim, "float64", mpips.uniform(bound), "sgd", learning_rate=0.1)
        for name, dim in DIMS.items()
    }
    return {feature: made[name] for feature, (name, _, _) in FEATURES.items()}


def rows_of(table: mpips.Table) -> Tensor:
    return torch.from_numpy(table.pull(np.arange(ROWS)))


class OneByOne(nn.Module):
    """A module for each feature, called as a collection is."""

    def __init__(self, bags: dict[str, nn.Module]) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(bags)

    def forward(self, ids: dict[str, Tensor], offsets: dict[str, Tensor]) -> dict[str, Tensor]:
        return {feature: bag(ids[feature], offsets[feature]) for feature, bag in self.bags.items()}


def loss_of(pooled: dict[str, Tensor]) -> Tensor:
    return sum((rows.sin() * (number + 1)).sum() for number, rows in enumerate(pooled.values()))  # type: ignore[return-value]


def train(model: nn.Module, worker: int, each: Callable[[int], Any] = lambda step: None) -> list[dict[str, Tensor]]:
    """Train by this worker's batches. Return the result of every forward pass."""
    optimizer, found = mpips.torch.TableOptimizer(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        found.append(model(*batch(step, worker)))
        each(step)
        loss_of(found[-1]).backward()
        optimizer.step()
    return found


@served
@pytest.mark.parametrize(
    "kind, options",
    [
        ("dist_sync", {"servers": 1}),
        ("dist_sync", {"servers": 2, "shared_memory": False}),
        ("mpi_sync", {"servers": 1, "clients": 1}),
    ],
)
def test_a_collection_trains_as_pytorch_does(kind: str, options: dict[str, Any]) -> None:
    """All batches of all workers in one process are the reference."""
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        tables = tables_of(kv)
        weights = {table.name: nn.Parameter(rows_of(table)) for table in tables.values()}
        plain = {feature: nn.EmbeddingBag(ROWS, dim, mode=mode) for feature, (_, dim, mode) in FEATURES.items()}
        for feature, (name, _, _) in FEATURES.items():
            plain[feature].weight = weights[name]
        model, sgd = OneByOne({**plain}), torch.optim.SGD(weights.values(), 0.1)
        expected = []
        for step in range(STEPS):
            sgd.zero_grad()
            pooled = [model(*batch(step, worker)) for worker in range(kv.num_workers)]
            expected.append(pooled[kv.rank])
            (sum(map(loss_of, pooled)) / kv.num_workers).backward()
            sgd.step()
        collection = mpips.torch.EmbeddingBagCollection(tables, MODES)
        found = train(collection, kv.rank)
        for step, (ours, wanted) in enumerate(zip(found, expected)):
            assert [*ours] == [*FEATURES]
            for feature in FEATURES:
                assert torch.allclose(ours[feature], wanted[feature], rtol=1e-10, atol=1e-12), (step, feature)
        for table in tables.values():
            assert torch.allclose(rows_of(table), weights[table.name], rtol=1e-10, atol=1e-12), table
            assert table.pushes == STEPS

    run(kind, body, **options)


@served
def test_gradients_are_those_of_pytorch() -> None:
    """Of one worker's batch, before they are pushed, for each id that it names."""

    def body(kv: mpips.KVStore) -> None:
        tables = tables_of(kv)
        collection = mpips.torch.EmbeddingBagCollection(tables, MODES)
        optimizer = mpips.torch.TableOptimizer(collection)
        weights = {table: nn.Parameter(rows_of(table)) for table in tables.values()}
        for step in range(3):
            ids, offsets = batch(step, kv.rank)
            loss_of(collection(ids, offsets)).backward()
            pooled = {
                feature: nn.functional.embedding_bag(
                    ids[feature], weights[table], offsets[feature], mode=MODES[feature]
                )
                for feature, table in tables.items()
            }
            wanted = torch.autograd.grad(loss_of(pooled), [*weights.values()])
            for rows, table, gradient in zip(collection.rows, weights, wanted):
                dense = torch.zeros(ROWS, table.dim).double()
                for named, some in rows.take_gradients():
                    dense[named] += some
                assert torch.allclose(dense, gradient, rtol=1e-12, atol=1e-14), table
        optimizer.zero_grad()

    run("dist_sync", body, servers=1)


@served
@pytest.mark.parametrize(
    "kind, options", [("dist_sync", {"servers": 1}), ("dist_sync", {"servers": 2}), ("dist_async", {"servers": 1})]
)
def test_a_collection_has_the_bits_of_a_module_for_each_feature(kind: str, options: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        # First rows depend on the name of a table, unless they are zeros.
        tables, others = tables_of(kv, bound=0), tables_of(kv, " one by one", bound=0)
        alone = OneByOne({name: mpips.torch.EmbeddingBag(table, MODES[name]) for name, table in others.items()})
        if kind == "dist_async" and kv.rank:
            return  # where several push, their order counts
        found, expected = train(mpips.torch.EmbeddingBagCollection(tables, MODES), kv.rank), train(alone, kv.rank)
        for step, (pooled, wanted) in enumerate(zip(found, expected)):
            assert all(torch.equal(pooled[feature], wanted[feature]) for feature in FEATURES), step
        assert all(torch.equal(rows_of(tables[feature]), rows_of(others[feature])) for feature in FEATURES)

    run(kind, body, **options)


@served
def test_a_forward_pass_is_one_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rows of one table were fetched before; a frozen collection pushes nothing."""
    pulls: list[int] = []
    pull = mpips.torch.collection.pull_rows

    def counted(ids: Any) -> Any:
        pulls.append(len(ids))
        return pull(ids)

    monkeypatch.setattr(mpips.torch.collection, "pull_rows", counted)

    def body(kv: mpips.KVStore) -> None:
        collection = mpips.torch.EmbeddingBagCollection(tables_of(kv), MODES)
        first = train(collection, kv.rank)
        assert pulls == [len(DIMS)] * STEPS
        collection.requires_grad_(False)
        before = [rows_of(rows.table) for rows in collection.rows]
        assert not any(pooled.requires_grad for pooled in collection(*batch(0, kv.rank)).values())
        assert all(torch.equal(rows_of(rows.table), old) for rows, old in zip(collection.rows, before))
        collection.requires_grad_(True)
        pulls.clear()
        again = train(collection, kv.rank, lambda step: collection.prefetch(batch(step + 1, kv.rank)[0]))
        assert pulls[:2] == [len(DIMS), 0] and len(first) == len(again)
        for rows in collection.rows:
            assert rows.table.pushes == 2 * STEPS
        kv.barrier()

    run("dist_sync", body, servers=1)


@served
def test_prefetched_rows_are_those_of_a_pull() -> None:
    def body(kv: mpips.KVStore) -> None:
        tables, others = tables_of(kv, bound=0), tables_of(kv, " prefetched", bound=0)
        plain = mpips.torch.EmbeddingBagCollection(tables, MODES)
        ahead = mpips.torch.EmbeddingBagCollection(others, MODES)
        expected = train(plain, kv.rank)
        found = train(ahead, kv.rank, lambda step: ahead.prefetch(batch(step + 1, kv.rank)[0]))
        assert all(torch.equal(a[name], b[name]) for a, b in zip(expected, found) for name in FEATURES)

    run("dist_sync", body, servers=1)


@served
def test_bags_are_said_by_offsets_lengths_or_shape() -> None:
    def body(kv: mpips.KVStore) -> None:
        tables = tables_of(kv)
        collection = mpips.torch.EmbeddingBagCollection(tables, "sum")
        ended = mpips.torch.EmbeddingBagCollection(tables, "sum", include_last_offset=True)
        ids, offsets = batch(1, kv.rank)
        expected = collection(ids, offsets)
        ends = {name: torch.cat([some, torch.tensor([len(ids[name])])]) for name, some in offsets.items()}
        lengths = {name: some.diff().int() for name, some in ends.items()}
        both = {name: some for name, some in ends.items() if name != "user"}, {"user": lengths["user"]}
        for found in (collection(ids, lengths=lengths), ended(ids, ends), ended(ids, *both)):
            assert all(torch.equal(found[name], expected[name]) for name in FEATURES)
        square = {name: torch.arange(6).view(3, 2) for name in FEATURES}
        for name, rows in collection(square).items():
            assert torch.equal(rows, rows_of(tables[name])[:6].view(3, 2, -1).sum(1))
        nothing = dict.fromkeys(FEATURES, torch.empty(0, dtype=torch.int64))
        for name, rows in collection(nothing, lengths=dict.fromkeys(FEATURES, torch.zeros(2).long())).items():
            assert torch.equal(rows, torch.zeros(2, tables[name].dim).double())
        for name, rows in collection(dict.fromkeys(FEATURES, torch.zeros(2, 0).long())).items():
            assert torch.equal(rows, torch.zeros(2, tables[name].dim).double())
        kv.barrier()

    run("dist_sync", body, servers=1)


@served
def test_bad_arguments_are_refused_by_a_sentence() -> None:
    def body(kv: mpips.KVStore) -> None:
        other = mpips.create("dist_sync", servers=1)
        table, elsewhere = kv.table("t", 2), other.table("u", 2)
        make, ids = mpips.torch.EmbeddingBagCollection, torch.arange(3)
        bags = make({"a": table, "b": table})
        both, starts = {"a": ids, "b": ids}, {"a": ids, "b": ids}
        calls: dict[str, Callable[[], Any]] = {
            "'t' and 'u' belong to different stores": lambda: make({"a": table, "b": elsewhere}),
            "'a' is not a table": lambda: make({"a": "a"}),  # type: ignore[dict-item]
            "give a dict of features and their tables": lambda: make([table]),  # type: ignore[arg-type]
            "mode of feature 'a' is 'max': give 'sum' or 'mean'": lambda: make({"a": table}, "max"),
            "mode names the features ['b'], and the collection has ['a']": lambda: make({"a": table}, {"b": "sum"}),
            "ids names the features ['a'], and the collection has ['a', 'b']": lambda: bags({"a": ids}, starts),
            "ids is a Tensor: give a dict with each feature": lambda: bags(ids, starts),  # type: ignore[arg-type]
            "feature 'b': ids have dtype torch.int32": lambda: bags({"a": ids, "b": ids.int()}, starts),
            "feature 'a' has 1-D ids: give their offsets or lengths": lambda: bags(both),
            "feature 'a' has offsets and lengths: give one": lambda: bags(both, starts, starts),
            "feature 'b': lengths of shape (2,) with the sum 4 do not fit ids of shape (3,)": lambda: bags(
                both, {"a": ids}, {"b": torch.tensor([2, 2])}
            ),
            "feature 'b' has lengths of type torch.float32": lambda: bags(
                both, {"a": ids}, {"b": torch.tensor([1.5, 1.5])}
            ),
            "offsets names the features ['a', 'b', 'c']": lambda: bags(both, {**starts, "c": ids}),
            "lengths is a Tensor: give a dict": lambda: bags(both, lengths=ids),  # type: ignore[arg-type]
            "rows are on servers": lambda: copy.deepcopy(bags),
            "that nobody pushes: make mpips.torch.TableOptimizer": lambda: bags(both, starts)["a"].sum().backward(),
        }
        for expected, call in calls.items():
            said = heard(call)
            assert expected in said, (expected, said)
        other.close()

    run("dist_sync", body, servers=1)


PROGRAM = """
import sys
from pathlib import Path

import torch

import mpips
import mpips.torch
from tests.mpi.deaths import die_later, wait_until_dead
from tests.mpi.mpips.support import WORLD
from tests.mpi.torch import test_collection as parts

folder, victims = Path(sys.argv[1]), [int(word) for word in sys.argv[2:]]
if WORLD.rank in victims:
    die_later(folder / "begun", 0.2)
kv = mpips.create("dist_sync")
collection, step = None, kv.resumed
while True:
    try:
        if collection is None:
            collection = mpips.torch.EmbeddingBagCollection(parts.tables_of(kv), parts.MODES)
            optimizer = mpips.torch.TableOptimizer(collection)
        while step < 200:
            (folder / "begun").touch()
            if step == 199:
                wait_until_dead(victims)
            optimizer.zero_grad()
            parts.loss_of(collection(*parts.batch(step, kv.rank))).backward()
            optimizer.step()
            step += 1
        found = [parts.rows_of(rows.table) for rows in collection.rows]
        break
    except mpips.StoreError:
        step = kv.recover().step
if kv.rank == 0:
    torch.save(found, folder / "rows.pt")
kv.close()
"""


@pytest.mark.skipif(bool(HINDRANCE), reason=HINDRANCE)
def test_a_collection_outlives_a_death_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the names of the tests
    found = []
    # nobody dies, a server dies, a worker dies
    for victims in ([], [2], [1]):
        folder = tmp_path / "-".join(["without", *map(str, victims)])
        folder.mkdir()
        (folder / "program.py").write_text(PROGRAM)
        words = [sys.executable, "-m", "launch.cli", "run", "-w", "2", "-s", "2", "--spares", "1"]
        out = io.BytesIO()
        code = child.run([*words, str(folder / "program.py"), str(folder), *map(str, victims)], JOB_LIMIT, ROOT, out)
        assert code == 0, out.getvalue().decode()
        found.append(torch.load(folder / "rows.pt"))
    assert all(torch.equal(row, first) for rows in found[1:] for row, first in zip(rows, found[0], strict=True))
