"""Measures an iteration of every strategy of overlap, and compares it with its prediction, in one MPI job.

    mpips run -n 4 -m examples.reproduce.overlap.measured --layers 20

Compute is emulated by sleeping, so that it needs no core. Messages are real and go through the store as in training
(`mpips.overlap.messages`, `mpips.overlap.exchange`). First the job measures what messages cost and how long its sleeps
last. All predictions come from that profile. Every iteration pushes other values, and the parameters after it are
checked.

Without servers an iteration is MG-WFBP's: forward, then backward with allreduces of the gradients. With `--servers S`
an iteration goes from the start of a backward pass to the end of the next forward pass. As in iBatch's figure 5, the
strategies decide about pulls, and gradients are pushed in one message after the backward pass. "joint" plans both
directions, and "layerwise, both" and "merged, both" overlap both directions by the same rule. `--topk R` repeats
everything with top-k pushes of the share R of the gradients (iBatch, figure 6).

`--setting` chooses the layers. Their compute time is derived from the measured cost of messages:

* the name of a network, such as resnet50: its layers, scaled down. Its compute time is such that all startups and bytes
  of an iteration take `weight` times as long. The size of the layers determines how much of this are startups, or
  `--startups` determines the size of the layers (`choose_kilobytes`).
* uniform: a deep MLP of equal small layers, with the same weight.
* hidden: equal layers whose messages take half as long as their backward pass. Merging them cannot pay.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table

from collectives.terminal import OutFile, Picture, RankedCommand, Whole, console, show_table, write_text, writing
from examples.reproduce.overlap.networks import MODELS
from examples.reproduce.overlap.rivals import PARTITIONS
from mpips.bench.kvstore import mark, marked
from mpips.overlap import exchange as runtime
from mpips.overlap import measure, planner, timeline
from mpips.overlap import timeline as trace
from mpips.overlap.messages import StoreMessages
from mpips.overlap.problem import PARAMETER_BYTES, JointPlan, LinearNetwork, Profile, bandwidth, create_profile
from mpips.overlap.problem import save_profile as write_profile
from mpips.overlap.timeline import Kind, Task
from mpips.store import create as processes

SETTINGS = ("uniform", "hidden", *MODELS)
# default of --weight: communication of an iteration over its compute
WEIGHT = 1.49
# share of the forward pass in the compute time
FORWARD = 1 / 3
# setting "hidden": time of a layer's message over that of its backward pass
HIDDEN = 0.5
# the optimizer's learning rate
RATE = 1e-3
# strategies for pushes without servers ("sequential" would be the same as "single"), for pulls, and for both directions
PUSHES = ("layerwise", "single", "merged", "ibatch", "optimal")
PULLS = ("sequential", "layerwise", "ibatch", "optimal")
BOTH = ("layerwise", "merged", "joint")


class StrategyResult(NamedTuple):
    """The result of one strategy."""

    # "dense", or top-k with its ratio
    pushes: str
    strategy: str
    # number of pushes and, with servers, of pulls
    messages: list[int]
    # seconds of an iteration; the measured ones of the slowest worker, median over iterations
    predicted_s: float
    measured_s: float
    # share of communication time hidden behind compute; the measured one from rank 0's trace
    predicted_hidden: float
    measured_hidden: float
    plan: JointPlan


def plans(job: OverlapJob, profile: Profile) -> dict[str, JointPlan]:
    """Return the plans to compare, by the name of their strategy."""
    link = link_of(job)
    if link is None:
        pushed = {name: PARTITIONS[name](profile.push()) for name in PUSHES}
        return {name: JointPlan(groups, len(groups), ()) for name, groups in pushed.items()}
    behind = PARTITIONS["single"](profile.push())
    found = {name: JointPlan(behind, 0, PARTITIONS[name](profile.pull())) for name in PULLS}
    return found | {f"{name}, both": planner.to_execute(profile, name, link) for name in BOTH}


def link_of(job: OverlapJob) -> Any:
    """Return how pushes and pulls share the link, or None without servers, when a push brings the parameters back."""
    wire = job.wire("")
    return None if wire.one_way else wire.link


def measure_strategies(
    job: OverlapJob, pushes: str, profile: Profile, iterations: int
) -> tuple[list[StrategyResult], dict[str, list[Task]]]:
    """Measure the strategies in turn. The first turn warms up and does not count. Collective over the workers.

    Return the results, and the trace of the last iteration of each strategy.
    """
    found, link, layers = plans(job, profile), link_of(job), len(job.elements)
    messages = {}
    for name, plan in found.items():
        wire = job.wire(f"{pushes} {name}")
        wire.plan(plan)
        messages[name] = runtime.Execution(wire, plan, wait_asleep if job.asleep else None)
    traces: dict[str, list[Task]] = {}
    numbers = dict.fromkeys(found, 0)

    def turn(name: str) -> float:
        numbers[name] += 1
        job.change(numbers[name])
        job.slowest(0.0)
        begin = time.perf_counter()
        traces[name] = iteration(messages[name], layers, job.compute_forward, job.compute_backward)
        seconds = job.slowest(time.perf_counter() - begin)
        # With top-k, no particular element is sure to be sent.
        if pushes == "dense":
            job.see(name, numbers[name])
        return seconds

    times: dict[str, list[float]] = {name: [] for name in found}
    for number in range(iterations + 1):
        # Every other round is in reverse order, so that no strategy always follows the same other one.
        for name in list(found)[:: -1 if number % 2 else 1]:
            times[name].append(turn(name))
    results = []
    for name, plan in found.items():
        expected = planner.iteration(profile, plan, link)
        count = [len(plan.push), plan.early + len(plan.pull)] if link else [len(plan.push)]
        results.append(
            StrategyResult(
                pushes,
                name,
                count,
                timeline.end(expected),
                float(np.median(times[name][1:])),
                timeline.hidden_share(expected),
                timeline.hidden_share(traces[name]),
                plan,
            )
        )
    return results, {f"{pushes} {name}".strip(): tasks for name, tasks in traces.items()}


def wait_asleep(message: Any) -> None:
    """Wait for a message by sleeping, so that only the communication thread progresses it, as during compute."""
    while not message.done:
        time.sleep(measure.POLL_SECONDS)
    message.wait()


def iteration(
    execution: runtime.Execution, layers: int, forward: Callable[[int], Any], backward: Callable[[int], Any]
) -> list[Task]:
    """Run one iteration and return its trace. Blocking; everything except the messages runs on the calling thread.

    Without servers, where pushes bring the parameters back, it is a forward pass and then a backward pass. With servers
    it is a backward pass and the next forward pass.

    Args:
        forward: Computes the forward pass of a layer, counted from 1.
        backward: Computes its backward pass.
    """
    origin = time.perf_counter()
    tasks: list[Task] = []
    execution.begin()

    def clocked(kind: Kind, layer: int, compute: Callable[[int], Any]) -> None:
        begin = time.perf_counter() - origin
        compute(layer)
        tasks.append(Task(kind, layer, layer, begin, time.perf_counter() - origin, timeline.COMPUTE))

    def down() -> None:
        for layer in range(layers, 0, -1):
            clocked("backward", layer, backward)
            execution.ready(layer)

    def up() -> None:
        for layer in range(1, layers + 1):
            execution.before(layer)
            clocked("forward", layer, forward)

    for half in (up, down) if execution.one_way else (down, up):
        half()
    execution.finish()
    return [*tasks, *runtime.sent_tasks(execution.sent, origin)]


def idle_seconds() -> np.ndarray:
    """Return the (idle, all) ticks of the machine's cores since it started. Linux only."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return np.array([ticks[3] + ticks[4], sum(ticks)], np.float64)


class OverlapWords(NamedTuple):
    """The options of the command line. `--help` explains them."""

    servers: int
    setting: str
    layers: int
    kilobytes: float
    startups: float | None
    weight: float
    topk: float | None
    asleep: bool
    iterations: int
    repeats: int


def check(ranks: int, *, servers: int, startups: float | None, topk: float | None, **_: Any) -> None:
    """Raise click.UsageError if this command line cannot be measured on `ranks` ranks. Starts no MPI."""
    if servers >= ranks:
        least = f"ask for --ranks {servers + 1} or more"
        raise click.UsageError(f"--ranks {ranks} and --servers {servers} leave no worker: {least}")
    if startups is not None and servers:
        raise click.UsageError("--startups is for allreduces: leave --servers out, or give --kilobytes")
    if topk is not None and not servers:
        raise click.UsageError("--topk needs --servers: sparse gradients go to servers")


@click.command("overlap", cls=RankedCommand)
@click.option("--servers", type=Whole(0), default=0, show_default=True, help="Servers among the ranks; 0: allreduces.")
@click.option("--setting", type=click.Choice(SETTINGS), default="uniform", show_default=True, help="Layers of the job.")
@click.option("--layers", type=Whole(1), default=40, show_default=True, help="Of uniform and hidden.")
@click.option("--kilobytes", default=32.0, show_default=True, help="Of a layer, on average.")
@click.option(
    "--startups",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Without servers: layers so large that startups are this share of communication; --kilobytes to begin with.",
)
@click.option("--weight", default=WEIGHT, show_default=True, help="Communication over compute; not of hidden.")
@click.option("--topk", type=float, help="With servers: once more with this share of the gradients pushed.")
@click.option(
    "--asleep",
    is_flag=True,
    help="Waits leave messages to the communication thread too, so that a startup is the same beside compute "
    "and behind it, as in the papers' models.",
)
@click.option("--iterations", type=Whole(1), default=10, show_default=True, help="Of every run.")
@click.option(
    "--repeats", type=Whole(1), default=3, show_default=True, help="Of every run when the network is measured."
)
@click.option("--json", "json_file", type=OutFile(), help="Write the results here.")
@click.option("--save-profile", type=OutFile(), help="Write the measured profile here, for `mpips plan`.")
@click.option("--plot", type=Picture(), help="Draw rank 0's iterations here (PNG).")
@click.option("--trace", "trace_file", type=OutFile(), help="Write them as a Chrome trace.")
def command(
    json_file: Path | None, save_profile: Path | None, plot: Path | None, trace_file: Path | None, **asked: Any
) -> None:
    """Measure every strategy of overlap beside its prediction; compute is emulated by sleeping.

    Start the ranks by `mpips run -n P -m examples.reproduce.overlap.measured`. How much of one allreduce hides behind
    compute is measured by `mpips bench iallreduce`.
    """
    check(MPI.COMM_WORLD.size, **asked)
    wanted = OverlapWords(**asked)
    job, found = run(wanted)
    # Close before writing files: if rank 0 fails to write, the other ranks do not wait for it.
    job.kv.close()
    if job.kv.rank:
        return
    about = _about(wanted, job, found.profiles) | {"cores_idle": found.cores_idle}
    _show(found.results, about)
    if json_file:
        data = about | {"strategies": [result._asdict() for result in found.results]}
        write_text(json_file, json.dumps(data, indent=1) + "\n")
    if save_profile:
        with writing(save_profile):
            write_profile(found.profiles["dense"], save_profile)
    if plot:
        title = f"measured, {wanted.setting}, {job.kv.num_workers} workers, compute emulated by sleeping"
        with writing(plot):
            trace.draw(found.traces, plot, title)
    if trace_file:
        with writing(trace_file):
            trace.save_chrome(found.traces, trace_file)


class OverlapResults(NamedTuple):
    """All results of a job."""

    results: list[StrategyResult]
    # pushes and strategy -> rank 0's last iteration
    traces: dict[str, list[Task]]
    # kind of push -> measured profile
    profiles: dict[str, Profile]
    # share of the cores that was idle during the iterations
    cores_idle: float


def run(wanted: OverlapWords) -> tuple[OverlapJob, OverlapResults]:
    """Make a job and measure all strategies in it. Collective."""
    if MPI.COMM_WORLD.rank == 0:
        click.echo("overlap: what messages cost", err=True)
    job, costs = _job(wanted)
    results: list[StrategyResult] = []
    traces: dict[str, list[Task]] = {}
    profiles, idle = {}, idle_seconds()
    kinds = ("dense",) if wanted.topk is None else ("dense", f"top-{wanted.topk:g}")
    for pushes in kinds:
        if job.kv.rank == 0:
            click.echo(f"overlap: {pushes} pushes, {wanted.iterations} iterations of every strategy", err=True)
        if pushes != "dense":
            job.kv.set_gradient_compression({"type": "topk", "ratio": wanted.topk})
            costs = job.costs(wanted.repeats)
        profiles[pushes] = job.profile(costs)
        more, drawn = measure_strategies(job, pushes, profiles[pushes], wanted.iterations)
        results += more
        traces |= drawn
    idle = idle_seconds() - idle
    return job, OverlapResults(results, traces, profiles, float(idle[0] / idle[1]))


def _job(wanted: OverlapWords) -> tuple[OverlapJob, tuple[float, ...]]:
    """Make a job whose layers have the size and compute time that the options ask for. Collective.

    Return it with the costs of its messages, see `OverlapJob.costs`.
    """
    elements, shares = choose_shape(wanted.setting, wanted.layers, wanted.kilobytes)
    job = OverlapJob(wanted.servers, elements, wanted.asleep)
    costs = job.costs(wanted.repeats)
    if wanted.startups is not None:
        fitting = choose_kilobytes(costs[0], costs[1], wanted.startups)
        job.hold(choose_shape(wanted.setting, wanted.layers, fitting).elements)
        costs = job.costs(wanted.repeats)
    communication = _communication(costs, job)
    # This gives startups exactly the share that was asked for.
    if wanted.startups is not None:
        communication = len(elements) * costs[0] / wanted.startups
    job.sleep_for(compute_seconds(wanted.setting, wanted.weight, communication), shares)
    return job, costs


def _communication(costs: tuple[float, ...], job: OverlapJob) -> float:
    """Return the seconds of an iteration's messages if each layer is a message: pushes and, with servers, pulls."""
    nbytes = PARAMETER_BYTES * sum(job.elements)
    one_way = [len(job.elements) * startup + nbytes * per_byte for startup, per_byte in (costs[:2], costs[2:])]
    return one_way[0] if link_of(job) is None else sum(one_way)


def _about(wanted: OverlapWords, job: OverlapJob, profiles: dict[str, Profile]) -> dict[str, Any]:
    dense = profiles["dense"]
    costs = {}
    for pushes, profile in profiles.items():
        for name, one in (("push", profile.push()), ("pull", profile.pull()))[: 2 if wanted.servers else 1]:
            costs[f"{pushes} {name}: startup_s"] = one.startup
            costs[f"{pushes} {name}: all_bytes_s"] = float(one.transfer.sum())
    compute_s = dense.forward_s + dense.backward_s
    if not wanted.servers:
        costs["startups over compute"] = len(dense.layers) * dense.push().startup / compute_s
        costs["bytes over compute"] = float(dense.push().transfer.sum()) / compute_s
    return {
        "setting": wanted.setting,
        "workers": job.kv.num_workers,
        "servers": wanted.servers,
        "layers": len(job.elements),
        "bytes": float(dense.nbytes.sum()),
        "compute_s": compute_s,
        "compute": "emulated by sleeping",
    } | costs


def _show(results: list[StrategyResult], about: dict[str, Any]) -> None:
    terminal = console()
    for name, value in about.items():
        terminal.print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    table = Table(
        "pushes",
        "strategy",
        "messages",
        "predicted ms",
        "measured ms",
        "measured / predicted",
        "hidden, predicted",
        "hidden, measured",
        "measured / best",
        caption="hidden: the share of the messages' time that lies beside compute",
    )
    for column in table.columns[2:]:
        column.justify = "right"
    best = min(result.measured_s for result in results)
    for r in results:
        table.add_row(
            r.pushes,
            r.strategy,
            " + ".join(map(str, r.messages)),
            f"{1e3 * r.predicted_s:.2f}",
            f"{1e3 * r.measured_s:.2f}",
            f"{r.measured_s / r.predicted_s:.3f}",
            f"{r.predicted_hidden:.0%}",
            f"{r.measured_hidden:.0%}",
            f"{r.measured_s / best:.3f}",
        )
    show_table(table, terminal)


class Shape(NamedTuple):
    """The layers of a setting: the float32 elements of each, and its share of the compute time."""

    elements: list[int]
    shares: np.ndarray


def choose_shape(setting: str, layers: int, kilobytes: float) -> Shape:
    """Return `layers` equal layers of `kilobytes` each, or a network's layers scaled so that this is their mean."""
    per_layer = kilobytes * 1024 / PARAMETER_BYTES
    if setting in ("uniform", "hidden"):
        return Shape([max(1, round(per_layer))] * layers, np.full(layers, 1 / layers))
    table = MODELS[setting]()
    scale = per_layer * len(table.layers) / table.parameters
    flops = np.array([layer.flops for layer in table.layers], np.float64)
    return Shape([max(1, round(scale * layer.parameters)) for layer in table.layers], flops / flops.sum())


def choose_kilobytes(startup_s: float, per_byte_s: float, share: float) -> float:
    """Return the mean size of a layer at which startups are this share of communication, with a message a layer."""
    return startup_s * (1 - share) / share / per_byte_s / 1024


def compute_seconds(setting: str, weight: float, communication_s: float) -> float:
    """Return the compute time of an iteration whose messages, one for each layer, take `communication_s` in all."""
    return communication_s / HIDDEN / (1 - FORWARD) if setting == "hidden" else communication_s / weight


class OverlapJob:
    """A store, flat arrays that are exchanged, and layers whose compute is a sleep."""

    def __init__(self, servers: int, elements: list[int], asleep: bool = False) -> None:
        # With big_array=1 every key is split over all servers, so that they have the same load.
        self.kv = processes.create("dist_sync" if servers else "mpi_sync", servers=servers, big_array=1)
        assert self.kv.layout.workers is not None
        self.kv.set_optimizer("sgd", learning_rate=RATE)
        self.comm = self.kv.layout.workers
        self.asleep = asleep
        self.hold(elements)

    def hold(self, elements: list[int]) -> None:
        """Set the number of parameters of each layer, and allocate the arrays."""
        self.elements = elements
        self.gradients = np.random.default_rng(self.kv.rank).normal(size=sum(elements)).astype(np.float32)
        self.parameters = np.zeros(sum(elements), np.float32)
        self.forward = self.backward = np.zeros(len(elements))
        # keys -> their marked parameters after the last iteration
        self._before: dict[str, np.ndarray] = {}

    def wire(self, name: str) -> StoreMessages:
        return StoreMessages(self.kv, self.gradients, self.parameters, self.elements, name)

    def slowest(self, seconds: float) -> float:
        """Return the largest value of all workers. It is also a barrier."""
        box = np.array([seconds])
        self.comm.Allreduce(box.copy(), box, op=MPI.MAX)
        return float(box[0])

    def agreed(self, values: Any) -> list[float]:
        """Return rank 0's values on all workers."""
        box = np.array(values, np.float64)
        self.comm.Bcast(box)
        return box.tolist()

    def sleep_for(self, seconds: float, shares: np.ndarray) -> None:
        """Set the compute seconds of all layers together, and each layer's share of them."""
        self.forward = seconds * FORWARD * shares
        self.backward = seconds * (1 - FORWARD) * shares

    def compute_forward(self, layer: int) -> None:
        time.sleep(self.forward[layer - 1])

    def compute_backward(self, layer: int) -> None:
        time.sleep(self.backward[layer - 1])

    def costs(self, repeats: int) -> tuple[float, ...]:
        """Measure startup and seconds a byte of a push, then of a pull. All workers return rank 0's."""
        modes = (True,) if self.asleep else (True, False)
        push, pull = measure.message_costs(self.wire("measured"), self.comm, repeats, modes)
        return tuple(self.agreed([*push, *pull]))

    def profile(self, costs: tuple[float, ...]) -> Profile:
        """Return the profile: these costs of messages, and how long the layers' sleeps last on rank 0. Collective."""
        a, b, startup, per_byte = costs
        names = [f"layer{number}" for number in range(1, len(self.elements) + 1)]
        forward, backward = self._clocked(self.compute_forward), self._clocked(self.compute_backward)
        network = LinearNetwork(a, b, self.kv.num_workers, "servers" if self.kv.layout.num_servers else "allreduce")
        return create_profile(names, self.elements, forward, backward, network, startup, bandwidth(per_byte))

    def _clocked(self, compute: Callable[[int], None]) -> list[float]:
        """Time `compute` of every layer while all ranks run it. Return rank 0's medians of 3. Collective."""
        times = np.empty((3, len(self.elements)))
        for row in times:
            self.slowest(0.0)
            for index in range(len(row)):
                begin = time.perf_counter()
                compute(index + 1)
                row[index] = time.perf_counter() - begin
        return self.agreed(np.median(times, axis=0))

    def change(self, number: int) -> None:
        """Set evenly spaced elements of the gradients to this rank's values for iteration `number`."""
        mark([self.gradients], self.kv.rank + number)

    def see(self, keys: str, number: int) -> None:
        """Raise RuntimeError unless iteration `number` has changed the parameters by exactly its own update.

        `keys` names a strategy's keys. Their first iteration is not checked, because nothing is known before it.
        """
        found = marked(self.parameters).copy()
        if keys in self._before:
            step = self._before[keys] - found
            wanted = RATE * sum(rank + number for rank in range(self.kv.num_workers))
            if not np.allclose(step, wanted, rtol=1e-2, atol=1e-6):
                wrong = step[np.argmax(np.abs(step - wanted))]
                raise RuntimeError(f"{keys}, iteration {number}: a parameter moved by {wrong:g}, not by {wanted:g}")
        self._before[keys] = found


if __name__ == "__main__":
    command()
