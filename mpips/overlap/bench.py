"""`python -m mpips.overlap.bench`: every strategy's iteration, measured beside its prediction, on the job's own ranks.

Run by all ranks of an MPI job. Compute is emulated by sleeping, so that it needs no core; messages are real and go
through the store, on the same path as in training (messages.py, runtime.py). First the job measures what messages cost
(measure.py) and how long its sleeps last; all predictions come from that profile. Settings: settings.py.

Without servers an iteration is MG-WFBP's: forward, then backward with allreduces of the gradients. With `--servers S`
it goes from the start of a backward pass to the end of the next forward pass. As in iBatch's figure 5, the strategies
choose the pulls, and gradients are pushed in one message behind the backward pass; "joint" plans both directions, and
"layerwise, both" and "merged, both" overlap both by the same rule. `--topk R` repeats everything with pushes of which
the share R travels (iBatch, figure 6).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from rich.table import Table

from collectives.terminal.console import OutFile, Picture, RankedCommand, console, write_text, writing

from . import measure as measuring
from . import planner, runtime, settings, timeline, trace
from .messages import StoreMessages
from .problem import JointPlan
from .profile import PARAMETER_BYTES, Linear, Profile, bandwidth, create_profile
from .profile import save_profile as save
from .strategies import PARTITIONS
from .timeline import Task

PUSHES = ("layerwise", "single", "merged", "ibatch", "optimal")  # sequential is single's partition
PULLS = ("sequential", "layerwise", "ibatch", "optimal")
BOTH = ("layerwise", "merged", "joint")


class Result(NamedTuple):
    """One strategy: seconds an iteration, the median over iterations of the slowest worker's; shares of communication
    hidden, the measured one from rank 0's trace; numbers of messages."""

    pushes: str
    strategy: str
    messages: list[int]
    predicted_s: float
    measured_s: float
    predicted_hidden: float
    measured_hidden: float
    plan: JointPlan


class Job:
    """A store, flat arrays that are exchanged, and layers that sleep."""

    def __init__(self, servers: int, elements: list[int], asleep: bool = False) -> None:
        from mpi4py import MPI

        import mpips

        self._max = MPI.MAX
        # Every key on all servers, so that none is busiest.
        self.kv = mpips.create("dist_sync" if servers else "mpi_sync", servers=servers, big_array=1)
        assert self.kv.layout.workers is not None
        self.kv.set_optimizer("sgd", learning_rate=1e-3)
        self.comm = self.kv.layout.workers
        self.asleep = asleep
        self.hold(elements)

    def hold(self, elements: list[int]) -> None:
        """Layers of so many parameters from now on."""
        self.elements = elements
        self.gradients = np.random.default_rng(self.kv.rank).normal(size=sum(elements)).astype(np.float32)
        self.parameters = np.zeros(sum(elements), np.float32)
        self.forward = self.backward = np.zeros(len(elements))

    def wire(self, name: str) -> StoreMessages:
        return StoreMessages(self.kv, self.gradients, self.parameters, self.elements, name)

    def slowest(self, seconds: float) -> float:
        """The largest over all workers; they start together after it."""
        box = np.array([seconds])
        self.comm.Allreduce(box.copy(), box, op=self._max)
        return float(box[0])

    def agreed(self, values: Any) -> list[float]:
        """Rank 0's values."""
        box = np.array(values, np.float64)
        self.comm.Bcast(box)
        return box.tolist()

    def sleep_for(self, seconds: float, shares: np.ndarray) -> None:
        """Layers take so many seconds from now on, all together."""
        self.forward, self.backward = seconds * settings.FORWARD * shares, seconds * (1 - settings.FORWARD) * shares

    def compute_forward(self, layer: int) -> None:
        time.sleep(self.forward[layer - 1])

    def compute_backward(self, layer: int) -> None:
        time.sleep(self.backward[layer - 1])

    def costs(self, repeats: int) -> tuple[float, ...]:
        """Startup and seconds a byte of a push, then of a pull; rank 0's on all workers."""
        push, pull = measuring.message_costs(
            self.wire("measured"), self.slowest, repeats, (True,) if self.asleep else (True, False)
        )
        return tuple(self.agreed([*push, *pull]))

    def profile(self, costs: tuple[float, ...]) -> Profile:
        """What messages cost, and how long layers sleep on rank 0; the same on all workers."""
        a, b, startup, per_byte = costs
        names = [f"layer{number}" for number in range(1, len(self.elements) + 1)]
        forward, backward = self._clocked(self.compute_forward), self._clocked(self.compute_backward)
        network = Linear(a, b, self.kv.num_workers, measuring.collective_of(self.kv))
        return create_profile(names, self.elements, forward, backward, network, startup, bandwidth(per_byte))

    def _clocked(self, compute: Callable[[int], None]) -> list[float]:
        """Seconds of every layer, as they are beside each other on all ranks: medians of 3."""
        times = np.empty((3, len(self.elements)))
        for row in times:
            self.slowest(0.0)
            for index in range(len(row)):
                begin = time.perf_counter()
                compute(index + 1)
                row[index] = time.perf_counter() - begin
        return self.agreed(np.median(times, axis=0))


def plans(job: Job, profile: Profile) -> dict[str, JointPlan]:
    """The strategies to compare, by name."""
    link = link_of(job)
    if link is None:
        return {name: planner.to_execute(profile, name, link) for name in PUSHES}
    behind = PARTITIONS["single"](profile.push())
    found = {name: JointPlan(behind, 0, PARTITIONS[name](profile.pull())) for name in PULLS}
    return found | {f"{name}, both": planner.to_execute(profile, name, link) for name in BOTH}


def link_of(job: Job) -> Any:
    """None where a push brings the parameters back."""
    wire = job.wire("")
    return None if wire.one_way else wire.link


def measure(job: Job, pushes: str, profile: Profile, iterations: int) -> tuple[list[Result], dict[str, list[Task]]]:
    """Strategies in turns; the first turn warms up."""
    found, link, layers = plans(job, profile), link_of(job), len(job.elements)
    messages = {}
    for name, plan in found.items():
        wire = job.wire(f"{pushes} {name}")
        wire.plan(plan)
        messages[name] = runtime.Execution(wire, plan, runtime.wait_asleep if job.asleep else None)
    times: dict[str, list[float]] = {name: [] for name in found}
    traces: dict[str, list[Task]] = {}
    for turn in range(iterations + 1):
        for name in found:
            job.slowest(0.0)
            begin = time.perf_counter()
            traces[name] = runtime.iteration(messages[name], layers, job.compute_forward, job.compute_backward)
            seconds = job.slowest(time.perf_counter() - begin)
            if turn:
                times[name].append(seconds)
    results = []
    for name, plan in found.items():
        expected = planner.iteration(profile, plan, link)
        count = [len(plan.push), plan.early + len(plan.pull)] if link else [len(plan.push)]
        results.append(
            Result(pushes, name, count, timeline.end(expected), float(np.median(times[name])),
                   timeline.hidden_share(expected), timeline.hidden_share(traces[name]), plan)
        )  # fmt: skip
    return results, {f"{pushes} {name}".strip(): tasks for name, tasks in traces.items()}


def idle_seconds() -> np.ndarray:
    """(idle, all) seconds of the machine's cores since it started, in ticks. Linux."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return np.array([ticks[3] + ticks[4], sum(ticks)], np.float64)


@click.command(cls=RankedCommand)
@click.option("--servers", type=click.IntRange(0), default=0, show_default=True,
              help="Servers among the ranks; 0: allreduces.")
@click.option("--setting", type=click.Choice(settings.SETTINGS), default="uniform", show_default=True)
@click.option("--layers", type=click.IntRange(1), default=40, show_default=True, help="Of uniform and hidden.")
@click.option("--kilobytes", default=32.0, show_default=True, help="Of a layer, on average.")
@click.option("--startups", type=click.FloatRange(0, 1, min_open=True, max_open=True),
              help="Without servers: layers so large that startups are this share of communication; --kilobytes to "
                   "begin with.")
@click.option("--weight", default=settings.WEIGHT, show_default=True, help="Communication over compute; not of hidden.")
@click.option("--topk", type=float, help="With servers: once more with this share of the gradients pushed.")
@click.option("--asleep", is_flag=True,
              help="Waits leave messages to the communication thread too, so that a startup is the same beside compute "
                   "and behind it, as in the papers' models.")
@click.option("--iterations", type=click.IntRange(1), default=10, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True,
              help="Of every run when the network is measured.")
@click.option("--json", "json_file", type=OutFile(), help="Write the results here.")
@click.option("--save-profile", type=OutFile(), help="Write the measured profile here, for `mpips plan`.")
@click.option("--plot", type=Picture(), help="Draw rank 0's iterations here (PNG).")
@click.option("--trace", "trace_file", type=OutFile(), help="Write them as a Chrome trace.")
def command(
    servers: int,
    setting: str,
    layers: int,
    kilobytes: float,
    startups: float | None,
    weight: float,
    topk: float | None,
    asleep: bool,
    iterations: int,
    repeats: int,
    json_file: Path | None,
    save_profile: Path | None,
    plot: Path | None,
    trace_file: Path | None,
) -> None:
    """Measure every strategy beside its prediction; compute is emulated by sleeping."""
    if startups is not None and servers:
        raise click.UsageError("--startups is for allreduces: leave --servers out, or give --kilobytes")
    if topk is not None and not servers:
        raise click.UsageError("--topk needs --servers: sparse gradients go to servers")
    elements, shares = settings.shape(setting, layers, kilobytes)
    job = Job(servers, elements, asleep)
    costs = job.costs(repeats)
    if startups is not None:
        fitting = settings.kilobytes(costs[0], costs[1], startups)
        job.hold(settings.shape(setting, layers, fitting).elements)
        costs = job.costs(repeats)
    communication = _communication(costs, job)
    if startups is not None:
        communication = len(elements) * costs[0] / startups  # that startups weigh exactly as asked
    job.sleep_for(settings.compute_seconds(setting, weight, communication), shares)
    results: list[Result] = []
    traces: dict[str, list[Task]] = {}
    profiles, idle = {}, idle_seconds()
    for pushes in ("dense",) if topk is None else ("dense", f"top-{topk:g}"):
        if pushes != "dense":
            job.kv.set_gradient_compression({"type": "topk", "ratio": topk})
            costs = job.costs(repeats)
        profiles[pushes] = job.profile(costs)
        more, drawn = measure(job, pushes, profiles[pushes], iterations)
        results += more
        traces |= drawn
    idle = idle_seconds() - idle
    job.kv.close()  # before files are written: nobody waits where that fails
    if job.kv.rank == 0:
        about = _about(setting, servers, job, profiles) | {"cores_idle": float(idle[0] / idle[1])}
        _show(results, about)
        if json_file:
            data = about | {"strategies": [result._asdict() for result in results]}
            write_text(json_file, json.dumps(data, indent=1) + "\n")
        if save_profile:
            with writing(save_profile):
                save(profiles["dense"], save_profile)
        if plot:
            title = f"measured, {setting}, {job.kv.num_workers} workers, compute emulated by sleeping"
            with writing(plot):
                trace.draw(traces, plot, title)
        if trace_file:
            with writing(trace_file):
                trace.save_chrome(traces, trace_file)


def _communication(costs: tuple[float, ...], job: Job) -> float:
    """Seconds of one message a layer, pushes and, with servers, pulls."""
    nbytes = PARAMETER_BYTES * sum(job.elements)
    one_way = [len(job.elements) * startup + nbytes * per_byte for startup, per_byte in (costs[:2], costs[2:])]
    return one_way[0] if link_of(job) is None else sum(one_way)


def _about(setting: str, servers: int, job: Job, profiles: dict[str, Profile]) -> dict[str, Any]:
    dense = profiles["dense"]
    costs = {}
    for pushes, profile in profiles.items():
        for name, one in (("push", profile.push()), ("pull", profile.pull()))[: 2 if servers else 1]:
            costs[f"{pushes} {name}: startup_s"] = one.startup
            costs[f"{pushes} {name}: all_bytes_s"] = float(one.transfer.sum())
    compute_s = dense.forward_s + dense.backward_s
    if not servers:
        costs["startups over compute"] = len(dense.layers) * dense.push().startup / compute_s
        costs["bytes over compute"] = float(dense.push().transfer.sum()) / compute_s
    return {
        "setting": setting, "workers": job.kv.num_workers, "servers": servers, "layers": len(job.elements),
        "bytes": float(dense.nbytes.sum()), "compute_s": compute_s,
        "compute": "emulated by sleeping",
    } | costs  # fmt: skip


def _show(results: list[Result], about: dict[str, Any]) -> None:
    terminal = console()
    for name, value in about.items():
        terminal.print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    table = Table("pushes", "strategy", "messages", "predicted s", "measured s", "measured / predicted",
                  "hidden, predicted", "hidden, measured", "measured / best")
    best = min(result.measured_s for result in results)
    for r in results:
        table.add_row(r.pushes, r.strategy, " + ".join(map(str, r.messages)), f"{r.predicted_s:.4f}",
                      f"{r.measured_s:.4f}", f"{r.measured_s / r.predicted_s:.3f}", f"{r.predicted_hidden:.0%}",
                      f"{r.measured_hidden:.0%}", f"{r.measured_s / best:.3f}")
    terminal.print(table)


if __name__ == "__main__":
    command()
