"""Measures how far every strategy of overlap is from the optimum, on random and on real profiles.

    python -m examples.reproduce.overlap.gap [--count 2000] [--json FILE]

The loss of a strategy is its makespan over the optimum's, minus one. One direction is planned: backward and pushes, or
forward and pulls, which is the same problem (see mpips/overlap/problem.py).

Random profiles draw the compute and bytes of layers from exponential distributions, and the startup and the share of
communication from log-uniform ones, so that every regime occurs. Real profiles are the papers' networks, for several
numbers of nodes and compute rates, on 10GbE.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from rich.table import Table

from collectives.terminal import Interruptible, OutFile, console, show_table, write_text
from examples.reproduce.overlap.networks import MODELS
from examples.reproduce.overlap.rivals import PARTITIONS
from mpips.overlap import joint
from mpips.overlap.problem import TEN_GIGABIT, Problem, makespan

# operations a second of half a K80, and of newer devices
RATES = (1.33e12, 5e12, 2e13)
NODES = (4, 8, 16, 32, 64)
# layers of the problems whose planning is timed
LAYERS = 200


class Loss(NamedTuple):
    """The loss of a strategy over a set of problems, as shares."""

    # the set of problems
    problems: str
    strategy: str
    median: float
    p95: float
    worst: float
    # share of the problems for which the optimum was found
    optimal: float


def random_stages(count: int, seed: int) -> Iterator[Problem]:
    """Yield problems of 2 to 100 layers.

    Communication is 0.1 to 10 times the compute, and startups are 0.1 % to 100 % of communication.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        layers = int(rng.integers(2, 101))
        compute, transfer = rng.exponential(size=layers), rng.exponential(size=layers)
        communication = compute.sum() * 10 ** rng.uniform(-1, 1)
        startups = 10 ** rng.uniform(-3, 0)
        yield Problem.of(
            compute, communication * startups / layers, transfer / transfer.sum() * communication * (1 - startups)
        )


def real_stages() -> Iterator[Problem]:
    """Yield the papers' networks, layer by layer, with batch 32 and ring allreduce on 10GbE."""
    link = TEN_GIGABIT
    for model in MODELS.values():
        for rate in RATES:
            profile = model().profile(rate, 32, link, link.alpha, 1 / link.beta)
            for nodes in NODES:
                yield profile.push(nodes)


def planning_seconds(layers: int, repeats: int, seed: int) -> dict[str, list[float]]:
    """Time the planning of random problems, another one in each repeat. Return strategy -> seconds of each repeat."""
    rng = np.random.default_rng(seed)
    times: dict[str, list[float]] = {}
    for _ in range(repeats):
        push, pull = (Problem.of(rng.exponential(size=layers), 0.5, rng.exponential(size=layers)) for _ in range(2))
        calls: dict[str, Callable[[], object]] = {name: partial(f, push) for name, f in PARTITIONS.items()}
        calls |= {
            "joint, shared": partial(joint.plan, push, pull, "shared"),
            "joint, duplex": partial(joint.plan, push, pull, "duplex"),
        }
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times.setdefault(name, []).append(time.perf_counter() - begin)
    return times


def losses(name: str, problems: list[Problem]) -> list[Loss]:
    """Return a row for each strategy. `name` is that of the set of problems."""
    best = np.array([makespan(p, PARTITIONS["optimal"](p)) for p in problems])
    rows = []
    for strategy, partition in PARTITIONS.items():
        loss = np.array([makespan(p, partition(p)) for p in problems]) / best - 1
        median, p95 = np.percentile(loss, [50, 95])
        rows.append(Loss(name, strategy, float(median), float(p95), float(loss.max()), float(np.mean(loss < 1e-9))))
    return rows


@click.command(cls=Interruptible)
@click.option("--count", type=click.IntRange(1), default=2000, show_default=True, help="Random profiles.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "json_file", type=OutFile(), help="Write the table here.")
def command(count: int, seed: int, json_file: Path | None) -> None:
    """Compare every strategy with the optimum."""
    rows = losses(f"{count} random", list(random_stages(count, seed)))
    real = list(real_stages())
    rows += losses(f"{len(real)} real", real)
    terminal = console()
    table = Table("profiles", "strategy", "median loss", "95 %", "worst", "found the optimum")
    for row in rows:
        table.add_row(row.problems, row.strategy, *(f"{share:.2%}" for share in row[2:5]), f"{row.optimal:.0%}")
    show_table(table, terminal)
    planning = planning_seconds(LAYERS, 15, seed)
    table = Table("strategy", "median ms", "worst ms", title=f"planning {LAYERS} layers, 15 random profiles")
    for name, seconds in planning.items():
        table.add_row(name, f"{1e3 * float(np.median(seconds)):.2f}", f"{1e3 * max(seconds):.2f}")
    show_table(table, terminal)
    if json_file:
        data = {"losses": [row._asdict() for row in rows], "planning_seconds_of_200_layers": planning}
        write_text(json_file, json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    command()
