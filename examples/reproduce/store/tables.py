"""Measures rows a second of an embedding table, of PyTorch's sparse `Embedding` under gloo DDP, and of torchrec.

    mpips run -w 2 -s 1 -m examples.reproduce.store.tables [--dims 32] [--ids zipf1.05,uniform] [--json FILE]

All contenders take turns in one job, with the same ids on the same workers. They train by Adagrad, torchrec by row-wise
Adagrad. A row counts each time that an id names it, on each worker. A sample takes as long as its slowest worker, and
the result is the median over the rounds. The first column of each contender is a lookup, the second is gradients until
the rows are updated, and the third is a lookup and then gradients, as in a training step.

The bound is what random rows allow on this machine: a plain array of as many rows, in the memory of one process, and a
loop that knows where each row lies. `gather` copies the rows of a worker's ids, on all workers at the same time.
`scatter` adds the gradients of all workers to the rows of their ids, in as many processes as there are servers, each
for the ids of one server. (Adagrad also reads and writes a row of state for each id.) Both are also measured in one
process while the others wait. The loops are compiled if Numba is installed, and `numpy.take` and `numpy.add.at` if not.

A rival that is not installed is left out, with a message. torchrec needs the build of fbgemm-gpu for CPUs:

    pip install torchrec && pip uninstall -y fbgemm-gpu && pip install --force-reinstall --no-deps fbgemm-gpu-cpu
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from rich.table import Table

import mpips
from collectives.kernels import engine
from collectives.kernels.function import compiled
from collectives.terminal import OutFile, RankedCommand, show_table, split_words, write_text
from mpips.store.keys.row_sums import AHEAD, CONSTANTS, owners_of

if TYPE_CHECKING:
    from mpips.collectives.kernels.compiler import prefetch

# least number of ids in a sample; with small batches a sample is several calls
LEAST_IDS = 1 << 15
# number of different batches, used in turn
BATCHES = 4
# number of ids pushed at a time while the rows are made
MADE_AT_ONCE = 1 << 17
# pause between contenders, after which a server sleeps and leaves its core to them
QUIET_SECONDS = 0.02
Array = NDArray[Any]
Ids = list[NDArray[np.int64]]
Sample = dict[str, float]


class Row(NamedTuple):
    """The result of one case, in million rows a second."""

    workers: int
    servers: int
    dim: int
    # "uniform", or "zipf" and its exponent
    ids: str
    batch: int
    # share of a worker's ids that are distinct
    distinct: float
    # the table of mpips
    pull: float
    push: float
    step: float
    # the rivals; 0 if one did not run
    gloo_pull: float
    gloo_push: float
    gloo_step: float
    # steps of mpips over gloo's
    over_gloo: float
    torchrec_pull: float
    torchrec_push: float
    torchrec_step: float
    over_torchrec: float
    # plain loops over random rows: in one process, and in all workers (for pulls) or as many as servers (for pushes)
    gather_one: float
    gather: float
    scatter_one: float
    scatter: float
    # pull over `gather`, and push over `scatter`
    share_of_gather: float
    share_of_scatter: float


def drawn(kind: str, rows: int, batch: int, rank: int) -> Ids:
    """Draw batches of ids below `rows`.

    Args:
        kind: "uniform", or "zipf" and an exponent S: the k-th most frequent id has a probability proportional to k^-S.
    """
    random = np.random.default_rng(1 + rank)
    if kind == "uniform":
        return [random.integers(0, rows, batch) for _ in range(BATCHES)]
    weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -float(kind.removeprefix("zipf")))
    # Permute the ids, so that frequent ids are not neighbours.
    places = np.random.default_rng(0).permutation(rows)
    return [places[np.searchsorted(weights, random.random(batch) * weights[-1])] for _ in range(BATCHES)]


@compiled("stored[], const stored[], const int64[], int64", ("float32",), CONSTANTS)
def gather(out: Array, values: Array, ids: Array, dim: int) -> int:
    """Copy the rows of ids into `out`."""
    for i in range(ids.size):
        ahead = ids[min(i + AHEAD, ids.size - 1)] * dim
        for k in range(0, dim, 16):
            prefetch(values, ahead + k)
        o_, v_ = out[i * dim : (i + 1) * dim], values[ids[i] * dim : (ids[i] + 1) * dim]
        for k in range(o_.size):
            o_[k] = v_[k]
    return 1


@compiled("stored[], const stored[], const int64[], int64", ("float32",), CONSTANTS)
def scatter_add(values: Array, gradients: Array, ids: Array, dim: int) -> int:
    """Add gradients to the rows of ids."""
    for i in range(ids.size):
        ahead = ids[min(i + AHEAD, ids.size - 1)] * dim
        for k in range(0, dim, 16):
            prefetch(values, ahead + k)
        v_, g_ = values[ids[i] * dim : (ids[i] + 1) * dim], gradients[i * dim : (i + 1) * dim]
        for k in range(g_.size):
            v_[k] += g_[k]
    return 1


class PlainRows:
    """The bound: a plain array of rows on each worker, read by `gather` and changed by `scatter_add`."""

    def __init__(self, servers: int, rows: int, dim: int) -> None:
        self._servers = servers
        # Rows begin at cache lines, as in the servers' memory.
        memory = np.full(rows * dim + 16, 0.5, np.float32)
        self._values = memory[-memory.ctypes.data % 64 // 4 :][: rows * dim].reshape(rows, dim)

    def sample(self, batches: Ids, calls: int, gradients: Any, out: Any, comm: MPI.Comm) -> Sample:
        """Return the seconds of `calls` lookups and updates, in all processes and in one. Collective."""
        values, dim = self._values, out.shape[1]
        every = [np.concatenate(ids) for ids in zip(*comm.allgather(batches))]
        threads = min(self._servers, comm.size)
        shares = [ids[owners_of(ids, threads) == comm.rank] for ids in every]
        pushed = np.resize(gradients, (len(every[0]), dim))

        def gathers() -> None:
            for call in range(calls):
                ids = batches[call % BATCHES]
                if not gather(out.reshape(-1), values.reshape(-1), ids, dim):
                    np.take(values, ids, axis=0, out=out, mode="clip")

        def scatters(parts: Ids) -> None:
            for call in range(calls):
                ids = parts[call % BATCHES]
                if not scatter_add(values.reshape(-1), pushed.reshape(-1), ids, dim):
                    np.add.at(values, ids, pushed[: len(ids)])

        return {
            "pull": seconds(comm, gathers),
            "push": seconds(comm, lambda: scatters(shares)),
            "pull_one": seconds(comm, lambda: None if comm.rank else gathers()) * comm.size,
            "push_one": seconds(comm, lambda: None if comm.rank else scatters(every)),
        }


class OurTable:
    """The contender of mpips. A sample has seconds of `calls` pulls, pushes and steps."""

    def __init__(
        self, kv: mpips.KVStore, rows: int, dim: int, dtype: str = "float32", rounding: str = "nearest"
    ) -> None:
        rule: dict[str, Any] = {"optimizer": "adagrad", "learning_rate": 0.01, "rounding": rounding}
        self._table = kv.table(f"{dtype}, {rounding}, dim {dim}", dim, dtype, init=mpips.uniform(0.05), **rule)
        # Push zeros to every id, which makes its row.
        for start in range(0, rows, MADE_AT_ONCE):
            ids = np.arange(start, min(rows, start + MADE_AT_ONCE))[kv.rank :: kv.num_workers]
            self._table.push(ids, np.zeros((len(ids), dim), self._table.dtype))

    def sample(self, batches: Ids, calls: int, gradients: Any, out: Any, comm: MPI.Comm) -> Sample:
        """Return the seconds of `calls` pulls, pushes and steps. Collective."""
        one, table = batches[0][:1], self._table

        def pushes() -> None:
            for call in range(calls):
                table.push(batches[call % BATCHES], gradients)
            # This is answered when the last round is complete.
            table.pull(one)

        def steps() -> None:
            for call in range(calls):
                table.pull(batches[call % BATCHES], out)
                table.push(batches[call % BATCHES], gradients)
            table.pull(one)

        return {
            "pull": seconds(comm, lambda: [table.pull(batches[call % BATCHES], out) for call in range(calls)]),
            "push": seconds(comm, pushes),
            "step": seconds(comm, steps),
        }


def seconds(comm: MPI.Comm, do: Callable[[], object]) -> float:
    comm.Barrier()
    begun = time.perf_counter()
    do()
    return time.perf_counter() - begun


class GlooTable:
    """PyTorch's embedding with sparse gradients: a copy on each worker, whose gradients gloo exchanges."""

    def __init__(self, group: Any, rows: int, dim: int) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        self._model = DistributedDataParallel(torch.nn.Embedding(rows, dim, sparse=True), process_group=group)
        self._optimizer = torch.optim.Adagrad(self._model.parameters(), lr=0.01)

    def sample(self, batches: Ids, calls: int, gradients: Any, out: Any, comm: MPI.Comm) -> Sample:
        """Return the seconds of `calls` lookups, of their gradients, and of both together. Collective."""
        import torch

        words = [torch.from_numpy(ids) for ids in batches]
        return steps_of(comm, calls, words, torch.from_numpy(gradients), self._model, self._update)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class TorchrecTable:
    """torchrec's collection of one table. Its rows are spread over the workers, and updated in the backward pass."""

    def __init__(self, group: Any, rows: int, dim: int) -> None:
        import torch
        import torchrec
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed import sharding_plan
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.types import ShardingEnv, ShardingPlan

        names = {"name": "rows", "feature_names": ["ids"]}
        table = torchrec.EmbeddingBagConfig(embedding_dim=dim, num_embeddings=rows, **names)
        model = torchrec.EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
        rule = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
        sharder: Any = EmbeddingBagCollectionSharder(fused_params=rule)
        parts = {"rows": sharding_plan.row_wise(compute_kernel="fused")}
        plan = sharding_plan.construct_module_sharding_plan(model, parts, sharder, group.size(), group.size(), "cpu")
        self._model = torchrec.distributed.DistributedModelParallel(
            model, ShardingEnv.from_process_group(group), torch.device("cpu"), ShardingPlan({"": plan}), [sharder]
        )

    def sample(self, batches: Ids, calls: int, gradients: Any, out: Any, comm: MPI.Comm) -> Sample:
        """Return the seconds of `calls` lookups, of their gradients, and of both. Each id is a bag. Collective."""
        import torch
        from torchrec import KeyedJaggedTensor

        ones = torch.ones(len(batches[0]), dtype=torch.int32)
        words = [KeyedJaggedTensor(keys=["ids"], values=torch.from_numpy(ids), lengths=ones) for ids in batches]
        return steps_of(comm, calls, words, torch.from_numpy(gradients), lambda bags: self._model(bags)["ids"], bool)


def steps_of(
    comm: MPI.Comm,
    calls: int,
    words: list[Any],
    gradients: Any,
    lookup: Callable[[Any], Any],
    update: Callable[[], object],
) -> Sample:
    """Time `calls` lookups by PyTorch, their gradients until the rows are updated, and both together. Collective."""
    forward = 0.0
    comm.Barrier()
    begun = time.perf_counter()
    for call in range(calls):
        before = time.perf_counter()
        rows = lookup(words[call % BATCHES])
        forward += time.perf_counter() - before
        rows.backward(gradients)
        update()
    whole = time.perf_counter() - begun
    return {"pull": forward, "push": whole - forward, "step": whole}


# name -> (class, module that it needs)
RIVALS = {"gloo": (GlooTable, "torch"), "torchrec": (TorchrecTable, "torchrec")}


def importable(rivals: list[str]) -> list[str]:
    """Return the rivals that can be imported, and print why others cannot."""
    found = []
    for name in rivals:
        try:
            importlib.import_module(RIVALS[name][1])
            found.append(name)
        except (ImportError, OSError) as error:
            click.echo(f"{name} is left out: {error}", err=True)
    return found


def gloo_group(comm: MPI.Comm) -> Any:
    """Make PyTorch's gloo group of the workers. Collective."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // comm.size))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True) if comm.rank == 0 else None
    port = comm.bcast(store.port if store else 0)
    store = store or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    return dist.group.WORLD


def measure(
    comm: MPI.Comm,
    servers: int,
    contenders: dict[str, Any],
    dim: int,
    kind: str,
    batch: int,
    rows: int,
    rounds: int,
) -> Row:
    """Time all contenders in one case, in turns. The first round warms up. Collective."""
    batches, calls = drawn(kind, rows, batch, comm.rank), max(1, LEAST_IDS // batch)
    gradients = np.random.default_rng(comm.rank).standard_normal((batch, dim), np.float32)
    out = np.zeros((batch, dim), np.float32)
    found: dict[str, list[Sample]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        for name, contender in contenders.items():
            comm.Barrier()
            time.sleep(QUIET_SECONDS)
            sample = contender.sample(batches, calls, gradients, out, comm)
            if round_:
                found[name].append({word: comm.allreduce(took, MPI.MAX) for word, took in sample.items()})
            else:
                engine.load_all()
    rate = {
        (name, word): calls * batch * comm.size / statistics.median(sample[word] for sample in samples) / 1e6
        for name, samples in found.items()
        for word in samples[0]
    }
    distinct = len(np.unique(batches[0])) / batch
    ours, *others = ([rate.get((name, word), 0.0) for word in ("pull", "push", "step")] for name in ("table", *RIVALS))
    beside = [number for other in others for number in (*other, ours[2] / other[2] if other[2] else 0.0)]
    return Row(
        comm.size,
        servers,
        dim,
        kind,
        batch,
        distinct,
        *ours,
        *beside,
        rate["plain", "pull_one"],
        rate["plain", "pull"],
        rate["plain", "push_one"],
        rate["plain", "push"],
        ours[0] / rate["plain", "pull"],
        ours[1] / rate["plain", "push"],
    )


def table_of(rows: list[Row], title: str) -> Table:
    columns = {
        "dim": "dim",
        "ids": "ids",
        "batch": "batch",
        "distinct": "distinct",
        "pull": "pull",
        "push": "push",
        "step": "step",
        "gloo_pull": "gloo: lookup",
        "gloo_push": "gradients",
        "gloo_step": "step",
        "over_gloo": "x gloo",
        "torchrec_pull": "torchrec: lookup",
        "torchrec_push": "gradients",
        "torchrec_step": "step",
        "over_torchrec": "x torchrec",
        "gather_one": "gather: one",
        "gather": "all",
        "scatter_one": "scatter: one",
        "scatter": "all",
        "share_of_gather": "pull / gather",
        "share_of_scatter": "push / scatter",
    }
    shown = Table(*columns.values(), title=title)
    for row in rows:
        values = [getattr(row, name) for name in columns]
        shown.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in values))
    return shown


def list_option(
    *names: str, default: str, help: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a click option whose value is a list of words, separated by commas."""
    return click.option(
        *names, default=default, show_default=True, callback=lambda _, __, text: split_words(text), help=help
    )


ids_option = list_option("--ids", "kinds", default="zipf1.05,uniform", help="uniform, or zipf and its exponent.")
BATCH_HELP = "Ids a worker gives at a time."


@click.command(cls=RankedCommand)
@list_option("--dims", default="8,32,128")
@ids_option
@list_option("--batches", default="1024,16384,262144", help=BATCH_HELP)
@click.option("--rows", default=1 << 20, show_default=True, type=click.IntRange(1), help="Of the table; all are there.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
@click.option(
    "--beside",
    "rivals",
    default=",".join(RIVALS),
    show_default=True,
    callback=lambda _, __, text: split_words(text) if text else [],
    help="Rivals that take turns; empty: none.",
)
@click.option("--json", "json_path", type=OutFile(), help="Write the rows there.")
def main(
    dims: list[str],
    kinds: list[str],
    batches: list[str],
    rows: int,
    rounds: int,
    rivals: list[str],
    json_path: Path | None,
) -> None:
    """Time a table of embeddings; a rank of `mpips run`."""
    with mpips.create("dist_sync") as kv:
        comm = kv.layout.workers
        servers = kv.layout.num_servers
        rivals = importable(rivals)
        group = gloo_group(comm) if rivals else None
        found = []
        for dim in map(int, dims):
            contenders: dict[str, Any] = {
                "table": OurTable(kv, rows, dim),
                "plain": PlainRows(servers, rows, dim),
            }
            contenders |= {name: RIVALS[name][0](group, rows, dim) for name in rivals}
            for kind in kinds:
                for batch in map(int, batches):
                    found.append(measure(comm, servers, contenders, dim, kind, batch, rows, rounds))
                    if comm.rank == 0:
                        click.echo(
                            "  ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in found[-1])
                        )
        if comm.rank == 0:
            title = f"million rows a second: {servers} servers, {comm.size} workers"
            show_table(table_of(found, title))
            if json_path:
                write_text(json_path, json.dumps([row._asdict() for row in found], indent=1))
        if group is not None:
            group.barrier().wait()
            importlib.import_module("torch.distributed").destroy_process_group()


if __name__ == "__main__":
    main()
