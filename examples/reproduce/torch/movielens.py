"""Trains MovieLens with tables and with PyTorch's own embeddings on gloo, and compares test errors and seconds.

mpips run -w 1 -s 1 -m examples.reproduce.torch.movielens alike --data recbole-1.2.1-py3-none-any.whl
mpips run -w 2 -s 1 -m examples.reproduce.torch.movielens tables --data ...
mpips run -w 2 -m examples.reproduce.torch.movielens gloo --data ...

`alike` trains both on one worker, with the same first values and the same batches, and prints the largest difference of
their errors. `gloo` trains `nn.Embedding(sparse=True)` under DDP, which sends the gradients of rows to all ranks.
"""

from __future__ import annotations

from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpips
import mpips.torch
from examples import torch_movielens as example

DIM, SIZE, RATE = 16, 1024, 0.05
TABLES = ("users", "films")


@click.command()
@click.argument("way", type=click.Choice(["alike", "tables", "gloo"]))
@click.option("--data", default="", help="A wheel of recbole, or a folder with ml-100k.inter and ml-100k.item.")
@click.option("--epochs", default=6)
@click.option("--until", default=0.0, help="Say when the error was below this.")
def command(way: str, data: str, epochs: int, until: float) -> None:
    """Train a factorisation of MovieLens 100k."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ratings = example.read(data)
    if way == "gloo":
        dist.init_process_group("gloo")
        rank, found = dist.get_rank(), by_pytorch(ratings, plain(ratings), epochs)
        dist.destroy_process_group()
    else:
        kv = mpips.create("dist_sync")
        tables = [kv.table(name, DIM, **example.RULE) for name in TABLES]
        rank, first = kv.rank, [table.pull(every(ratings)) for table in tables]
        found = by_tables(kv, tables, ratings, epochs)
        kv.close()
        if way == "alike":
            other = by_pytorch(ratings, plain(ratings, first), epochs)
            apart = max(abs(one[0] - two[0]) for one, two in zip(found, other))
            click.echo(f"largest difference of test errors over {epochs} epochs: {apart:.2e}")
    if rank == 0 and until:
        reached = [(epoch, seconds) for epoch, (error, seconds) in enumerate(found, 1) if error < until]
        said = "never" if not reached else f"after epoch {reached[0][0]}, {reached[0][1]:.2f} s"
        click.echo(f"{way}: error below {until:g} {said}; {found[-1][1] / epochs:.3f} s an epoch")


def every(ratings: example.Ratings) -> Any:
    """Return all ids of users and films."""
    return torch.arange(int(max(ratings.users.max(), ratings.films.max())) + 1).numpy()


def plain(ratings: example.Ratings, first: Any = None) -> nn.Module:
    """Return a factorisation with PyTorch's embeddings.

    `first` has their first values. None: draw them from the distribution from which tables draw.
    """
    made = [nn.Embedding(len(every(ratings)), DIM, sparse=True) for _ in TABLES]
    for place, embedding in enumerate(made):
        nn.init.uniform_(embedding.weight, -0.05, 0.05)
        if first is not None:
            embedding.weight = nn.Parameter(torch.from_numpy(first[place].copy()))
    return example.Factors(*made, float(ratings.stars.mean()))


def by_pytorch(ratings: example.Ratings, net: nn.Module, epochs: int) -> list[tuple[float, float]]:
    """Train PyTorch's embeddings, under DDP if there is a process group."""
    grouped = dist.is_initialized()
    forward = nn.parallel.DistributedDataParallel(net) if grouped else net
    rank, workers = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=RATE)
    return example.train(net, forward, [optimizer], ratings, epochs, SIZE, rank, workers)


def by_tables(
    kv: mpips.KVStore, tables: list[mpips.Table], ratings: example.Ratings, epochs: int
) -> list[tuple[float, float]]:
    """Train with tables, as the example does."""
    users, films = (mpips.torch.Embedding(table) for table in tables)
    net = example.Factors(users, films, float(ratings.stars.mean()))
    optimizers = mpips.torch.TableOptimizer(net), torch.optim.Adagrad(net.parameters(), lr=RATE)

    def prefetch(batch: Tensor) -> None:
        users.prefetch(ratings.users[batch])
        films.prefetch(ratings.films[batch])

    forward = mpips.torch.DataParallel(net)
    return example.train(net, forward, optimizers, ratings, epochs, SIZE, kv.rank, kv.num_workers, prefetch)


if __name__ == "__main__":
    command()
