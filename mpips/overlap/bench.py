"""`python -m mpips.overlap.bench`: every strategy's iteration, measured beside its prediction, on the job's own ranks.

Run by all ranks of an MPI job. Without servers it pushes: backward with allreduces of the gradients (MG-WFBP). With
`--servers S` it pulls: forward with parameters fetched from S servers (iBatch), no pushes. Compute is emulated by
sleeping, so that it needs no core; messages are real and go through the store (ipushpull, ipull), one key a group.
First the job measures its network and how long its sleeps last, which is the profile; all predictions come from that
profile. Settings, all chosen from the network as measured:

* resnet50: the 107 layers of ResNet-50 scaled down, with so much compute that all startups and bytes together are 1.49
  of it, as on MG-WFBP's 64 nodes; how they share that follows from `--kilobytes`. Merging should pay.
* uniform: a deep MLP of equal small layers under the same weight.
* hidden: equal layers whose messages are half as long as their backward pass. `optimal` should not merge anything.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from . import execute, timeline, trace
from .measure import network, sample_groups
from .models import MODELS
from .planner import Direction, Plan, plans
from .profile import PARAMETER_BYTES, Linear, Profile, create, save
from .stage import Groups
from .timeline import Task

STRATEGIES = ("layerwise", "single", "merged", "ibatch", "optimal")  # sequential is single's partition
COMMUNICATION = 1.49  # of the compute, see above
FORWARD = 1 / 3  # of the compute
HIDDEN = 0.5  # of a layer's backward pass
FILE = click.Path(dir_okay=False, path_type=Path)


class Result(NamedTuple):
    """One strategy: seconds an iteration, the median over iterations of the slowest rank's; shares of rank 0's
    trace."""

    strategy: str
    groups: Groups
    predicted_s: float
    measured_s: float
    predicted_hidden: float
    measured_hidden: float


class Job:
    """A store with one key for every group that is used, over one flat buffer of gradients and one of parameters."""

    def __init__(self, servers: int, elements: list[int]) -> None:
        from mpi4py import MPI

        import mpips

        self._max = MPI.MAX
        kind = "dist_sync" if servers else "mpi_sync"
        self.kv = mpips.create(kind, servers=servers, big_array=1)  # every key on all servers, so that none is busiest
        self.pulls = servers > 0
        self.direction: Direction = "pull" if self.pulls else "push"
        assert self.kv.layout.workers is not None
        self.comm = self.kv.layout.workers
        self.offsets = np.concatenate(([0], np.cumsum(elements)))
        self.gradients = np.ones(self.offsets[-1], np.float32)
        self.parameters = np.zeros(self.offsets[-1], np.float32)
        self._keys: set[tuple[int, int]] = set()

    def prepare(self, groups: Sequence[tuple[int, int]]) -> None:
        """Make the groups' keys."""
        new = [group for group in groups if group not in self._keys]
        self._keys.update(new)
        if new:
            self.kv.init([str(group) for group in new], [self.gradients[self._interval(*group)] for group in new])

    def message(self, first: int, last: int) -> Any:
        """Start the message of layers first..last."""
        where = self._interval(first, last)
        if self.pulls:
            # One after the other, as in the model: at once, the first group would share the link with those behind it.
            return self.kv.ipull(str((first, last)), self.parameters[where], turns=["link"])
        return self.kv.ipushpull(str((first, last)), self.gradients[where], out=self.parameters[where])

    def slowest(self, seconds: float) -> float:
        """The largest over all workers; they start together after it."""
        box = np.array([seconds])
        self.comm.Allreduce(box.copy(), box, op=self._max)
        return float(box[0])

    def agreed(self, values: list[float]) -> list[float]:
        """Rank 0's values."""
        box = np.array(values, np.float64)
        self.comm.Bcast(box)
        return box.tolist()

    def _interval(self, first: int, last: int) -> slice:
        return slice(int(self.offsets[first - 1]), int(self.offsets[last]))


def measure_network(job: Job, elements: list[int], repeats: int) -> tuple[float, float]:
    """(startup, seconds a byte), rank 0's on all ranks."""
    job.prepare(sample_groups(elements))
    startup, per_byte = job.agreed(list(network(elements, job.message, job.slowest, repeats)))
    return startup, per_byte


def measure_compute(job: Job, forward: execute.Compute, backward: execute.Compute, layers: int) -> list[list[float]]:
    """Seconds of every layer's forward and backward pass, as they are beside each other on all ranks: medians of 3."""
    rows = []
    for kind, compute in (("forward", forward), ("backward", backward)):
        runs = []
        for _ in range(3):
            job.slowest(0.0)
            clock = execute.Clock()
            for layer in range(1, layers + 1):
                with clock.computing(kind, layer):  # type: ignore[arg-type]
                    compute(layer)
            runs.append([task.seconds for task in clock.tasks])
        rows.append(job.agreed(np.median(runs, axis=0).tolist()))
    return rows


class Shape(NamedTuple):
    """Layers of a setting: float32 elements of each, and its share of the compute."""

    elements: list[int]
    shares: np.ndarray


def shape(setting: str, layers: int, kilobytes: float) -> Shape:
    """`layers` equal layers of `kilobytes`, or ResNet-50's own with that on average."""
    per_layer = kilobytes * 1024 / PARAMETER_BYTES
    if setting != "resnet50":
        return Shape([max(1, round(per_layer))] * layers, np.full(layers, 1 / layers))
    table = MODELS["resnet50"]()
    scale = per_layer * len(table.layers) / table.parameters
    flops = np.array([layer.flops for layer in table.layers], np.float64)
    return Shape([max(1, round(scale * layer.parameters)) for layer in table.layers], flops / flops.sum())


def compute_seconds(setting: str, layers: int, startup: float, per_byte: float, nbytes: float) -> float:
    """Forward and backward of all layers, for the setting."""
    total = layers * startup + per_byte * nbytes
    return total / HIDDEN / (1 - FORWARD) if setting == "hidden" else total / COMMUNICATION


def measure(job: Job, found: list[Plan], forward: execute.Compute, backward: execute.Compute,
            iterations: int) -> tuple[list[Result], dict[str, list[Task]]]:
    """Strategies in turns; the first turn warms up."""
    run = execute.pull_iteration if job.pulls else execute.push_iteration
    times: dict[str, list[float]] = {plan.strategy: [] for plan in found}
    traces: dict[str, list[Task]] = {}
    for turn in range(iterations + 1):
        for plan in found:
            job.prepare(plan.groups)
            job.slowest(0.0)
            begin = time.perf_counter()
            tasks = run(plan.groups, forward, backward, job.message)
            seconds = job.slowest(time.perf_counter() - begin)
            if turn:
                times[plan.strategy].append(seconds)
                traces[plan.strategy] = tasks
    results = [
        Result(plan.strategy, plan.groups, plan.iteration_s, float(np.median(times[plan.strategy])), plan.hidden_share,
               timeline.hidden_share(traces[plan.strategy]))
        for plan in found
    ]
    return results, traces


@click.command()
@click.option("--servers", default=0, show_default=True, help="Servers among the ranks; 0: allreduces.")
@click.option("--setting", type=click.Choice(["resnet50", "uniform", "hidden"]), default="resnet50", show_default=True)
@click.option("--layers", default=40, show_default=True, help="Of uniform and hidden.")
@click.option("--kilobytes", default=32.0, show_default=True, help="Of a layer, on average.")
@click.option("--iterations", default=10, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Of every message size when the network is measured.")
@click.option("--json", "json_file", type=FILE, help="Write the results here.")
@click.option("--save-profile", type=FILE, help="Write the measured profile here, for `mpips plan`.")
@click.option("--plot", type=FILE, help="Draw rank 0's iterations here (PNG).")
@click.option("--trace", "trace_file", type=FILE, help="Write them as a Chrome trace.")
def command(
    servers: int,
    setting: str,
    layers: int,
    kilobytes: float,
    iterations: int,
    repeats: int,
    json_file: Path | None,
    save_profile: Path | None,
    plot: Path | None,
    trace_file: Path | None,
) -> None:
    """Measure every strategy beside its prediction; compute is emulated by sleeping."""
    elements, shares = shape(setting, layers, kilobytes)
    layers = len(elements)
    job = Job(servers, elements)
    startup, per_byte = measure_network(job, elements, repeats)
    total = compute_seconds(setting, layers, startup, per_byte, PARAMETER_BYTES * float(job.offsets[-1]))
    forward, backward = _sleeper(total * FORWARD * shares), _sleeper(total * (1 - FORWARD) * shares)
    profile = _profile(job, elements, startup, per_byte, measure_compute(job, forward, backward, layers))
    found = plans(profile, STRATEGIES, job.direction)
    results, traces = measure(job, found, forward, backward, iterations)
    if job.kv.rank == 0:
        about = {"setting": setting, "workers": job.kv.num_workers, "servers": servers, "direction": job.direction,
                 "layers": layers, "bytes": sum(elements) * PARAMETER_BYTES, "startup_s": startup,
                 "seconds_per_byte": per_byte, "compute_s": profile.forward_s + profile.backward_s,
                 "compute": "emulated by sleeping"}
        _show(results, about)
        if json_file:
            data = about | {"strategies": [result._asdict() for result in results]}
            json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        if save_profile:
            save(profile, save_profile)
        if plot:
            trace.draw(traces, plot, f"measured, {setting}, {job.kv.num_workers} workers, compute emulated by sleeping")
        if trace_file:
            trace.save_chrome(traces, trace_file)
    job.kv.close()


def _sleeper(seconds: np.ndarray) -> Callable[[int], None]:
    return lambda layer: time.sleep(seconds[layer - 1])


def _profile(job: Job, elements: list[int], startup: float, per_byte: float, compute: list[list[float]]) -> Profile:
    forward, backward = compute
    names = [f"layer{number}" for number in range(1, len(elements) + 1)]
    allreduce = Linear(startup, per_byte, job.kv.num_workers)
    return create(names, elements, forward, backward, allreduce, startup, 1 / per_byte)


def _show(results: list[Result], about: dict[str, Any]) -> None:
    console = Console(width=120)
    for name, value in about.items():
        console.print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}", highlight=False)
    table = Table("strategy", "groups", "predicted s", "measured s", "measured / predicted", "hidden, predicted",
                  "hidden, measured", "measured / optimal")
    best = {result.strategy: result.measured_s for result in results}["optimal"]
    for r in results:
        table.add_row(r.strategy, str(len(r.groups)), f"{r.predicted_s:.4f}", f"{r.measured_s:.4f}",
                      f"{r.measured_s / r.predicted_s:.3f}", f"{r.predicted_hidden:.0%}", f"{r.measured_hidden:.0%}",
                      f"{r.measured_s / best:.3f}")
    console.print(table)


if __name__ == "__main__":
    command()
