"""Modules whose rows are a table's train as PyTorch's do, and do right where ranks differ."""

from __future__ import annotations

import contextlib
import copy
import operator
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpips
import mpips.torch
import mpips.torch.embedding
from tests.mpi.mpips.reference_table import ReferenceTable
from tests.mpi.mpips.support import run
from tests.mpi.torch.support import WORLD, heard

ROWS, DIM, STEPS = 12, 4, 6
served = pytest.mark.skipif(WORLD.size == 1, reason="tables need a server")
several = pytest.mark.skipif(WORLD.size < 3, reason="it takes two workers and a server")
Losses = Callable[[nn.Module, int, int], Tensor | None]
"""Of a network, a step and a rank."""
PLAIN: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "adam": lambda ps: torch.optim.SparseAdam(list(ps), 0.1, eps=1e-30),
}
OPTIONS: dict[str, dict[str, Any]] = {"sgd": {}, "adagrad": {}, "adam": {"epsilon": 1e-30}}


def table_of(kv: mpips.KVStore, optimizer: str = "sgd", name: str = "t") -> mpips.Table:
    init = mpips.uniform(0.5)
    return kv.table(name, DIM, "float64", init, optimizer, learning_rate=0.1, **OPTIONS[optimizer])


class Net(nn.Module):
    """Rows, a layer, a number for each sample. `bags`: samples are of 3 ids each."""

    def __init__(self, rows: nn.Module, bags: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows, self.bags, self.last = rows, bags, nn.Linear(DIM, 1).double()

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.rows(ids if self.bags else ids.reshape(-1)))[:, 0]


def plain_of(table: mpips.Table, bags: str = "", padding: int | None = None) -> nn.Module:
    """PyTorch's own module with the table's first rows."""
    first = torch.from_numpy(table.pull(torch.arange(ROWS).numpy()))
    words: dict[str, Any] = {"sparse": True, "padding_idx": padding}
    if padding is not None:
        first[padding] = 0
    made = nn.EmbeddingBag(ROWS, DIM, mode=bags, **words) if bags else nn.Embedding(ROWS, DIM, **words)
    made.weight = nn.Parameter(first)
    return made


def ids_of(step: int, rank: int) -> Tensor:
    """Ids of one worker's batch, 6 times 3. Every row stands there, as SparseAdam counts steps of all rows alike."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    some = torch.randint(3, (6,), generator=generator)
    return torch.cat([torch.randperm(ROWS, generator=generator), some]).view(6, 3)


def loss_of(net: nn.Module, ids: Tensor) -> Tensor:
    return (net(ids) - 1).pow(2).mean()


def trained_plain(kv: mpips.KVStore, net: Net, optimizer: str, losses: Losses, dense: bool = False) -> Tensor:
    """Train on all workers' batches in one process; the rows then. `dense`: the last layer, too."""
    weight, each = net.rows.weight, PLAIN[optimizer](net.rows.parameters())
    assert isinstance(weight, nn.Parameter)
    net.last.requires_grad_(dense)
    hooks = [p.register_hook(lambda gradient: gradient / kv.num_workers) for p in net.parameters() if p.requires_grad]
    layer = torch.optim.SGD(net.last.parameters(), 0.1)
    for step in range(STEPS):
        net.zero_grad()
        for rank in range(kv.num_workers):
            loss = losses(net, step, rank)
            if loss is not None:
                loss.backward()
        each.step()
        layer.step()
    for hook in hooks:
        hook.remove()
    kv.barrier()
    return weight.detach()


def train(kv: mpips.KVStore, net: nn.Module, losses: Losses) -> None:
    """Train the rows of a net alone, a step for each loss, or without one."""
    rows = mpips.torch.TableOptimizer(net)
    for step in range(STEPS):
        rows.zero_grad()
        loss = losses(net, step, kv.rank)
        if loss is not None:
            loss.backward()
        rows.step()


def rows_of(table: mpips.Table) -> Tensor:
    return torch.from_numpy(table.pull(torch.arange(ROWS).numpy()))


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-10, atol=1e-10)


@served
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_are_tensors_of_that_type(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    kind: dict[str, Any] = {"dtype": name, "optimizer": "adagrad", "rounding": "stochastic", "learning_rate": 0.1}

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", DIM, init=mpips.uniform(0.5), **kind)
        expected = ReferenceTable("t", DIM, init=0.5, **kind)
        rows = mpips.torch.Embedding(table)
        bags = mpips.torch.EmbeddingBag(table, mode="sum")
        both = mpips.torch.EmbeddingBagCollection({"a": table}, mode="sum")
        optimizer = mpips.torch.TableOptimizer(nn.ModuleList([rows, bags]))
        factors = torch.arange(1, DIM + 1).to(dtype)
        for step in range(STEPS):
            ids = [ids_of(step, rank) for rank in range(kv.num_workers)]
            found = rows(ids[kv.rank])
            assert found.dtype == bags(ids[kv.rank]).dtype == dtype
            assert torch.equal(both({"a": ids[kv.rank]})["a"], bags(ids[kv.rank]))
            wanted = torch.from_numpy(expected.pull(ids[kv.rank].numpy()).view(np.int16)).view(dtype)
            assert torch.equal(found, wanted), step
            (found * factors).sum().backward()
            rows.prefetch(ids_of(step + 1, kv.rank))
            optimizer.step()
            pushes = []
            for some in ids:  # backward sums the gradients of an id, and the step divides them by the workers
                once, counts = torch.unique(some, return_counts=True)
                gradients = (counts[:, None].to(dtype) * factors) / kv.num_workers
                pushes.append((once.numpy(), gradients.view(torch.int16).numpy().view(expected.dtype)))
            expected.push(pushes)
        kv.barrier()

    run("dist_sync", body, servers=1)


@served
@pytest.mark.parametrize("way, optimizer", [*(("data_parallel", each) for each in PLAIN), ("ddp", "adagrad")])
@pytest.mark.parametrize("bags", ["", "sum", "mean"])
def test_tables_train_as_pytorch_does(bags: str, optimizer: str, way: str) -> None:
    """The dense layer is averaged by DDP or DataParallel, on the workers alone: the server has left the program."""

    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv, optimizer)
        expected = Net(plain_of(table, bags), bool(bags))
        weight = trained_plain(kv, expected, optimizer, once, dense=True)
        module = mpips.torch.EmbeddingBag(table, bags) if bags else mpips.torch.Embedding(table)
        net = Net(module, bool(bags))
        with contextlib.ExitStack() as stack:
            if way == "ddp":
                dist.init_process_group("mpips")
                stack.callback(dist.destroy_process_group)
                assert (dist.get_rank(), dist.get_world_size()) == (kv.rank, kv.num_workers)
            whole = nn.parallel.DistributedDataParallel(net) if way == "ddp" else mpips.torch.DataParallel(net)
            rows, dense = mpips.torch.TableOptimizer(whole), torch.optim.SGD(net.last.parameters(), 0.1)
            for step in range(STEPS):
                rows.zero_grad()
                dense.zero_grad()
                loss_of(whole, ids_of(step, kv.rank)).backward()
                rows.step()
                dense.step()
            assert close(rows_of(table), weight)
            assert close(net.last.weight, expected.last.weight)

    run("dist_sync", body, servers=1)


def once(net: nn.Module, step: int, rank: int) -> Tensor:
    return loss_of(net, ids_of(step, rank))


def twice(net: nn.Module, step: int, rank: int) -> Tensor:
    return loss_of(net, ids_of(step, rank)) + loss_of(net, ids_of(step + 50, rank)[:2])


def accumulated(net: nn.Module, step: int, rank: int) -> Tensor:
    loss_of(net, ids_of(step + 50, rank)).backward()
    return loss_of(net, ids_of(step, rank))


def retained(net: nn.Module, step: int, rank: int) -> Tensor:
    loss = loss_of(net, ids_of(step, rank))
    loss.backward(retain_graph=True)
    return 2 * loss


def recomputed(net: nn.Module, step: int, rank: int) -> Tensor:
    made = checkpoint(net, ids_of(step, rank), use_reentrant=False)
    assert isinstance(made, Tensor)
    return (made - 1).pow(2).mean()


def looked_at(net: nn.Module, step: int, rank: int) -> Tensor:
    """Forward passes that are not to count: without a graph, and without a backward pass."""
    with torch.no_grad():
        assert not net(ids_of(step + 50, rank)).requires_grad
    net(ids_of(step + 60, rank))
    return loss_of(net, ids_of(step, rank))


@served
@pytest.mark.parametrize("losses", [twice, accumulated, retained, recomputed, looked_at])
def test_gradients_wait_for_one_push(losses: Losses) -> None:
    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv, "adagrad")
        weight = trained_plain(kv, Net(plain_of(table)), "adagrad", losses)
        net = Net(mpips.torch.Embedding(table))
        train(kv, net, losses)
        assert table.pushes == STEPS
        assert close(rows_of(table), weight)

    run("dist_sync", body, servers=1)


@served
def test_modules_of_one_table_push_it_together() -> None:
    class Pair(nn.Module):
        def __init__(self, one: nn.Module, bag: nn.Module) -> None:
            super().__init__()
            self.one, self.bag = one, bag

        def forward(self, ids: Tensor) -> Tensor:
            weights = torch.linspace(-1, 1, ids.numel()).double()
            cut = self.bag(ids, torch.tensor([0, 2, 2]), weights)
            return self.one(ids) * self.bag(ids.view(-1, 1), per_sample_weights=weights.view(-1, 1)) + cut.sum(0)

    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        one, bag = plain_of(table), plain_of(table, "sum")
        bag.weight = plain_rows = one.weight
        expected = Net(Pair(one, bag))
        expected.rows.weight = plain_rows
        weight = trained_plain(kv, expected, "sgd", once)
        train(kv, Net(Pair(mpips.torch.Embedding(table), mpips.torch.EmbeddingBag(table, "sum"))), once)
        assert table.pushes == STEPS
        assert close(rows_of(table), weight)

    run("dist_sync", body, servers=1)


@served
@pytest.mark.parametrize("bags", ["", "sum", "mean"])
def test_padding_is_zeros_and_has_no_row(bags: str) -> None:
    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv, "adagrad")
        weight = trained_plain(kv, Net(plain_of(table, bags, 2), bool(bags)), "adagrad", once)
        made = mpips.torch.EmbeddingBag(table, bags, 2) if bags else mpips.torch.Embedding(table, padding_idx=2)
        train(kv, Net(made, bool(bags)), once)
        others = torch.arange(ROWS) != 2
        assert close(rows_of(table)[others], weight[others])
        assert made(torch.full((1, 3), 2)).count_nonzero() == 0
        kv.barrier()
        assert table.rows == ROWS - 1

    run("dist_sync", body, servers=1)


NO_IDS = torch.empty(0, dtype=torch.int64)
CALLS: dict[str, tuple[Tensor | None, ...]] = {
    "2-D": (torch.arange(6).view(2, 3),),
    "no bags": (torch.empty(0, 3, dtype=torch.int64),),
    "1-D": (torch.arange(3),),
    "empty bags": (torch.arange(4), torch.tensor([0, 0, 3, 4])),
    "only empty bags": (NO_IDS, torch.tensor([0, 0])),
    "no ids": (NO_IDS, NO_IDS),
    "int32": (torch.arange(4), torch.tensor([0, 4], dtype=torch.int32)),
    "too far": (torch.arange(3), torch.tensor([0, 7])),
    "2-D with offsets": (torch.arange(4).view(2, 2), NO_IDS),
    "weights": (torch.arange(4), torch.tensor([0, 4]), torch.arange(4.0).double()),
    "weights in 2-D": (torch.arange(4).view(2, 2), None, torch.ones(2, 2).double()),
}


@served
@pytest.mark.parametrize("last", [False, True], ids=["", "include_last_offset"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_take_the_calls_of_pytorch(mode: str, last: bool) -> None:
    """And refuse what it refuses, by the same sentence."""

    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        plain = nn.EmbeddingBag(ROWS, DIM, mode=mode, include_last_offset=last, padding_idx=2)
        plain.weight = nn.Parameter(rows_of(table))
        bag = mpips.torch.EmbeddingBag(table, mode, padding_idx=np.int64(2), include_last_offset=last)
        for what, call in CALLS.items():
            said, expected = heard(lambda: bag(*call)), heard(lambda: plain(*call))  # noqa: B023
            assert said == expected, what
            assert said or torch.equal(bag(*call), plain(*call)), what

    run("dist_sync", body, servers=1)


@served
def test_a_frozen_table_stays_until_it_learns_again() -> None:
    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        before, net = rows_of(table), Net(mpips.torch.Embedding(table))
        for learns in (False, True):
            net.rows.requires_grad_(learns)
            train(kv, net, once)
            assert torch.equal(rows_of(table), before) != learns
        assert net.last.weight.grad is not None

    run("dist_sync", body, servers=1)


@served
def test_two_optimizers_of_one_model_push_a_gradient_once() -> None:
    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        weight = trained_plain(kv, Net(plain_of(table)), "sgd", once)
        net = Net(mpips.torch.Embedding(table))
        others = mpips.torch.TableOptimizer(net), mpips.torch.TableOptimizer(net)
        for step in range(STEPS):
            once(net, step, kv.rank).backward()
            for each in others:
                each.step()
        assert close(rows_of(table), weight)

    run("dist_sync", body, servers=1)


@served
def test_a_step_that_is_forgotten_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpips.torch.embedding, "MANY", 3)

    def body(kv: mpips.KVStore) -> None:
        net = Net(mpips.torch.Embedding(table_of(kv)))
        rows = mpips.torch.TableOptimizer(net)
        for passes in (2, 3):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for step in range(passes):
                    once(net, step, kv.rank).backward()
            rows.step()
            words = [str(one.message) for one in said if "forward passes wait: call step()" in str(one.message)]
            assert len(words) == (passes == 3)

    run("dist_sync", body, servers=1)


@served
def test_rows_follow_the_type_of_the_model() -> None:
    """The table keeps its own."""

    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        before = rows_of(table)
        net, ids = Net(mpips.torch.Embedding(table)).to(torch.bfloat16), ids_of(0, kv.rank)
        rows = mpips.torch.TableOptimizer(net)
        loss = loss_of(net, ids)
        assert loss.dtype == torch.bfloat16
        loss.backward()
        rows.step()
        assert net.float()(ids).dtype == torch.float32
        assert (rows_of(table) - before).abs().max() > 1e-4

    run("dist_sync", body, servers=1)


@served
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("bags", ["", "mean"])
def test_a_compiled_model_trains_alike(bags: str, backend: str) -> None:
    if backend == "inductor" and not shutil.which("c++"):
        pytest.skip("there is no C++ compiler")

    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        weight = trained_plain(kv, Net(plain_of(table, bags), bool(bags)), "sgd", once)
        torch.compiler.reset()
        net = Net(mpips.torch.EmbeddingBag(table, bags) if bags else mpips.torch.Embedding(table), bool(bags))
        train(kv, torch.compile(net, backend=backend), once)  # type: ignore[arg-type]
        assert close(rows_of(table), weight)
        torch.compiler.reset()
        whole = torch.compile(net, backend=backend, fullgraph=True)
        assert "compile without fullgraph=True" in heard(lambda: whole(ids_of(0, 0)))

    run("dist_sync", body, servers=1)


@several
@pytest.mark.parametrize("how", ["no ids", "no forward"])
def test_a_worker_without_a_batch_counts_as_zero(how: str) -> None:
    def losses(net: nn.Module, step: int, rank: int) -> Tensor | None:
        if (step + rank) % 2:
            return once(net, step, rank)
        return None if how == "no forward" else net(torch.empty(0, dtype=torch.int64)).sum()

    def plain(net: nn.Module, step: int, rank: int) -> Tensor | None:
        return once(net, step, rank) if (step + rank) % 2 else None

    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        weight = trained_plain(kv, Net(plain_of(table)), "sgd", plain)
        train(kv, Net(mpips.torch.Embedding(table)), losses)
        assert close(rows_of(table), weight)

    run("dist_sync", body, servers=1)


@served
def test_scaled_gradients_train_as_others_do() -> None:
    """Those of one worker overflow in one step, those of another in the next: all skip both. One lacks a batch."""

    def skipped(kv: mpips.KVStore) -> range:
        return range(2, 2 + min(2, kv.num_workers))

    def body(kv: mpips.KVStore) -> None:
        def plain(net: nn.Module, step: int, rank: int) -> Tensor | None:
            return None if step in skipped(kv) or (step == 5 and rank) else once(net, step, rank)

        table = table_of(kv, "adagrad")
        weight = trained_plain(kv, Net(plain_of(table)), "adagrad", plain)
        net = Net(mpips.torch.Embedding(table))
        rows = mpips.torch.TableOptimizer(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=100)
        for step in range(STEPS):
            rows.zero_grad()
            if step != 5 or not kv.rank:
                loss = once(net, step, kv.rank)
                scaler.scale(loss * (float("inf") if step == 2 + kv.rank and step in skipped(kv) else 1)).backward()
            if step % 2:
                scaler.unscale_(rows)  # type: ignore[arg-type]
                nn.utils.clip_grad_norm_(rows.param_groups[0]["params"], 1e6)
            scaler.step(rows)  # type: ignore[arg-type]
            scaler.update()
        assert scaler.get_scale() == 64 * 0.5 ** len(skipped(kv))
        assert table.pushes == STEPS - len(skipped(kv))
        assert close(rows_of(table), weight)

    run("dist_sync", body, servers=1)


@served
def test_tables_of_two_stores_go_to_their_own() -> None:
    """Under one TableOptimizer; their names may be equal. A scaler's overflow on one worker skips both."""

    def body(first: mpips.KVStore) -> None:
        for kind, other in (("dist_sync", "t"), ("dist_sync", "u"), ("dist_async", "t")):
            name, second = f"{kind}-{other}", mpips.create(kind, servers=1)
            tables = [
                store.table(f"{name}-{each}", DIM, "float64", mpips.uniform(0), learning_rate=1.0)
                for store, each in ((first, "t"), (second, other))
            ]
            users, items = (mpips.torch.Embedding(table) for table in tables)
            rows, scaler = mpips.torch.TableOptimizer(nn.ModuleList([users, items])), torch.amp.GradScaler("cpu")
            scales = 2 if kind == "dist_sync" else 0
            for step in range(2 + scales):
                rows.zero_grad()
                loss = (users(torch.tensor([5])) + 10 * items(torch.tensor([5]))).sum()
                if step < 2:
                    loss.backward()
                    rows.step()
                else:
                    lost = float("inf") if step == 2 and first.rank == first.num_workers - 1 else 1.0
                    scaler.scale(loss * lost).backward()
                    scaler.step(rows)  # type: ignore[arg-type]
                    scaler.update()
            first.barrier()
            second.barrier()
            counted, each = 2 + scales // 2, 1 if kind == "dist_sync" else first.num_workers
            got = [float(table.pull(np.array([5]))[0, 0]) for table in tables]
            assert got == [-counted, -10 * counted * each], (name, got)
            second.close()

    run("dist_sync", body, servers=1)


@served
def test_a_scaler_and_a_table_of_float16_are_refused_on_all_workers() -> None:
    """Also on one that has no gradient, and waits for nobody. Nothing is pushed."""

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", DIM, "float16")
        rows = mpips.torch.Embedding(table)
        optimizer, scaler = mpips.torch.TableOptimizer(rows), torch.amp.GradScaler("cpu", init_scale=2.0**16)
        loss = rows(torch.arange(3)).float().sum()
        scaled = scaler.scale(loss)
        if not kv.rank:
            scaled.backward()
        said = heard(lambda: scaler.step(optimizer))  # type: ignore[arg-type]
        assert "with a GradScaler: table 't' is float16, and so are its gradients, which GradScaler does not" in said
        assert table.pushes == 0

    run("dist_sync", body, servers=1)


@several
def test_an_asynchronous_store_refuses_a_scaler() -> None:
    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        net = Net(mpips.torch.Embedding(table))
        rows, scaler = mpips.torch.TableOptimizer(net), torch.amp.GradScaler("cpu")
        scaler.scale(once(net, 0, kv.rank)).backward()
        said = heard(lambda: scaler.step(rows))  # type: ignore[arg-type]
        assert said.startswith("ValueError: TableOptimizer.step with a GradScaler: workers of a dist_async store"), said
        assert table.pushes == 0

    run("dist_async", body, servers=1)


@several
def test_one_worker_evaluates_alone() -> None:
    def losses(net: nn.Module, step: int, rank: int) -> Tensor:
        if rank == 0:
            with torch.no_grad():
                net(torch.arange(-5, ROWS))
        return once(net, step, rank)

    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        weight = trained_plain(kv, Net(plain_of(table)), "sgd", once)
        train(kv, Net(mpips.torch.Embedding(table)), losses)
        assert close(rows_of(table), weight)

    run("dist_sync", body, servers=1)


@several
def test_a_step_left_out_is_named_at_the_end() -> None:
    def body(kv: mpips.KVStore) -> None:
        said = ""
        table = table_of(kv)
        net = Net(mpips.torch.Embedding(table))
        rows = mpips.torch.TableOptimizer(net)
        try:
            for step in range(STEPS):
                loss_of(net, ids_of(step, kv.rank)).backward()
                if (kv.rank, step) != (1, 2):
                    rows.step()
            net(torch.arange(ROWS))
            if kv.rank == 1:
                said = "needs rank 1, which has left the store"
        except mpips.StoreError as error:
            said = str(error)
        assert "needs rank 1, which has left the store" in said, said

    # ---- prefetch

    run("dist_sync", body, servers=1)


@served
@pytest.mark.parametrize("whole", [False, True], ids=["table.load", "kv.load"])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_rows_that_were_prefetched_before_a_load_are_read_anew(tmp_path: Path, kind: str, whole: bool) -> None:
    folder = Path(WORLD.bcast(str(tmp_path)))

    def body(kv: mpips.KVStore) -> None:
        table, ids = kv.table("t", 3, optimizer="sgd", learning_rate=1.0), torch.arange(5)
        module, ones = mpips.torch.Embedding(table), np.ones((5, 3), np.float32)
        saves, loads = (kv.save, kv.load) if whole else (table.save, table.load)
        table.push(ids.numpy(), ones)
        kv.barrier()
        saved = table.pull(ids.numpy())
        saves(str(folder / "saved"))
        table.push(ids.numpy(), ones)
        module.prefetch(ids)
        kv.barrier()
        loads(str(folder / "saved"))
        with torch.no_grad():
            assert (module(ids).numpy() == saved).all()
        kv.barrier()

    run(kind, body, servers=1)


@served
@pytest.mark.parametrize("place", ["before forward", "before step", "after step", "of other ids"])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_prefetched_rows_are_those_of_a_pull(kind: str, place: str) -> None:
    """In an asynchronous store a step of this worker may be missing."""

    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv, "adagrad")
        weight = trained_plain(kv, Net(plain_of(table)), "adagrad", once)
        module = mpips.torch.Embedding(table)
        pull, pulls = table.pull, []

        def counted(*words: Any) -> Any:
            pulls.append(words)
            return pull(*words)

        table.pull = counted  # type: ignore[method-assign, assignment]
        net, asked = Net(module), torch.arange(5)
        rows = mpips.torch.TableOptimizer(net)
        for step in range(STEPS):
            if place != "of other ids":
                asked = ids_of(step + 1, kv.rank).reshape(-1)
            for here in ("before forward", "before step", "after step"):
                if here == place or (here == "before step" and place == "of other ids"):
                    module.prefetch(asked)
                if here == "before forward":
                    once(net, step, kv.rank).backward()
                elif here == "before step":
                    rows.step()
            asked.zero_()  # whoever reads batches may use their memory again
        assert len(pulls) == (STEPS if place == "of other ids" else 1)
        table.pull = pull  # type: ignore[method-assign]
        if kind == "dist_sync":
            assert close(rows_of(table), weight)
        else:
            assert rows_of(table).isfinite().all()

    run(kind, body, servers=1)


@served
def test_wrong_use_is_said_in_a_sentence() -> None:
    def body(kv: mpips.KVStore) -> None:
        table = table_of(kv)
        net = Net(mpips.torch.Embedding(table))
        bag = mpips.torch.EmbeddingBag(table)
        ids = torch.arange(3)
        scored = kv.table("best", DIM, limit=9, evict_by="score")
        calls: dict[str, Callable[[], Any]] = {
            "Embedding of table 't': ids have dtype torch.int32, and need torch.int64": lambda: net.rows(ids.int()),
            "ids have dtype torch.float32": lambda: bag(ids.float(), torch.tensor([0])),
            "ids are a list": lambda: net.rows.prefetch([1]),  # type: ignore[operator]
            "a tensor is on meta": lambda: net.rows(ids.to("meta")),
            "give the one table": lambda: mpips.torch.Embedding(10, 3),  # type: ignore[arg-type]
            "Embedding(Linear(": lambda: mpips.torch.Embedding(net.last),  # type: ignore[arg-type]
            "padding_idx='x' is not a whole number": lambda: mpips.torch.Embedding(table, padding_idx="x"),  # type: ignore
            "mode='max': give 'sum' or 'mean'": lambda: mpips.torch.EmbeddingBag(table, "max"),
            "'t' has a gradient that nobody pushes: make mpips.torch.TableOptimizer": lambda: net(ids).sum().backward(),
            "the model has no mpips.torch.Embedding": lambda: mpips.torch.TableOptimizer(net.last),
            "table 'best' has evict_by='score', and a step has no scores to push: take": lambda: (
                mpips.torch.TableOptimizer(nn.ModuleList([bag, mpips.torch.Embedding(scored)]))
            ),
            "model is a list": lambda: mpips.torch.TableOptimizer([net]),  # type: ignore[arg-type]
            "padding_idx=9223372036854775808 is no int64": lambda: mpips.torch.Embedding(table, padding_idx=2**63),
            "of table 't' has no argument max_norm: leave it out": lambda: mpips.torch.Embedding(table, max_norm=1.0),
            "'t' cannot be copied or pickled, as its rows are on servers": lambda: copy.deepcopy(net),
            "a trace would keep the rows of these ids for all": lambda: torch.jit.trace(net, ids, check_trace=False),
            "Embedding of table 't': a trace would keep": lambda: torch.export.export(net, (ids,)),
        }
        for sentence, call in calls.items():
            assert sentence in heard(call), (sentence, heard(call))
        assert "'t', dim=4" in repr(net)
        rows = mpips.torch.TableOptimizer(net)
        group = rows.param_groups[0]
        assert "takes no 'lr': give numbers such as the rate" in heard(lambda: operator.setitem(group, "lr", 1))
        assert "has no 'lr': give numbers" in heard(lambda: group["lr"])
        net(ids).sum().backward()
        rows.step()  # nothing was lost
        assert table.pushes == 1

    run("dist_sync", body, servers=1)
