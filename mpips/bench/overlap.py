"""`mpips bench overlap`: the iteration of every strategy of overlap, measured beside its prediction.

Run by all ranks of an MPI job. Compute is emulated by sleeping, so that it needs no core. Messages are real and go
through the store as in training (`mpips.overlap.messages`, `mpips.overlap.runtime`). First the job measures what
messages cost and how long its sleeps last. All predictions come from that profile. Every iteration pushes other
values, and the parameters that it leaves are looked at.

Without servers an iteration is MG-WFBP's: forward, then backward with allreduces of the gradients. With `--servers S`
it goes from the start of a backward pass to the end of the next forward pass. As in iBatch's figure 5, the strategies
choose the pulls, and gradients are pushed in one message behind the backward pass; "joint" plans both directions, and
"layerwise, both" and "merged, both" overlap both by the same rule. `--topk R` repeats everything with pushes of which
the share R travels (iBatch, figure 6).
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table

from collectives.terminal.console import OutFile, Picture, RankedCommand, console, write_text, writing
from collectives.terminal.tables import show_table
from mpips.bench import overlap_settings as settings
from mpips.bench.overlap_job import Job
from mpips.bench.timing import alternate
from mpips.overlap import planner, runtime, timeline, trace
from mpips.overlap.problem import JointPlan
from mpips.overlap.profile import PARAMETER_BYTES, Profile
from mpips.overlap.profile import save_profile as write_profile
from mpips.overlap.strategies import PARTITIONS
from mpips.overlap.timeline import Task

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
    traces: dict[str, list[Task]] = {}
    numbers = dict.fromkeys(found, 0)

    def turn(name: str) -> float:
        numbers[name] += 1
        job.change(numbers[name])
        job.slowest(0.0)
        begin = time.perf_counter()
        traces[name] = runtime.iteration(messages[name], layers, job.compute_forward, job.compute_backward)
        seconds = job.slowest(time.perf_counter() - begin)
        if pushes == "dense":  # of sparse gradients no element is sure to travel
            job.see(name, numbers[name])
        return seconds

    times = alternate({name: partial(turn, name) for name in found}, iterations + 1)
    results = []
    for name, plan in found.items():
        expected = planner.iteration(profile, plan, link)
        count = [len(plan.push), plan.early + len(plan.pull)] if link else [len(plan.push)]
        results.append(
            Result(pushes, name, count, timeline.end(expected), float(np.median(times[name][1:])),
                   timeline.hidden_share(expected), timeline.hidden_share(traces[name]), plan)
        )  # fmt: skip
    return results, {f"{pushes} {name}".strip(): tasks for name, tasks in traces.items()}


def idle_seconds() -> np.ndarray:
    """(idle, all) seconds of the machine's cores since it started, in ticks. Linux."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return np.array([ticks[3] + ticks[4], sum(ticks)], np.float64)


class Wanted(NamedTuple):
    """What the command line asks to be measured; see its help."""

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
    """click.UsageError where the command line cannot be measured on that many ranks. Starts no MPI."""
    if servers >= ranks:
        least = f"ask for --ranks {servers + 1} or more"
        raise click.UsageError(f"--ranks {ranks} and --servers {servers} leave no worker: {least}")
    if startups is not None and servers:
        raise click.UsageError("--startups is for allreduces: leave --servers out, or give --kilobytes")
    if topk is not None and not servers:
        raise click.UsageError("--topk needs --servers: sparse gradients go to servers")


@click.command("overlap", cls=RankedCommand)
@click.option("--servers", type=click.IntRange(0), default=0, show_default=True,
              help="Servers among the ranks; 0: allreduces.")
@click.option("--setting", type=click.Choice(settings.SETTINGS), default="uniform", show_default=True,
              help="Layers of the job.")
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
@click.option("--iterations", type=click.IntRange(1), default=10, show_default=True, help="Of every run.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True,
              help="Of every run when the network is measured.")
@click.option("--json", "json_file", type=OutFile(), help="Write the results here.")
@click.option("--save-profile", type=OutFile(), help="Write the measured profile here, for `mpips plan`.")
@click.option("--plot", type=Picture(), help="Draw rank 0's iterations here (PNG).")
@click.option("--trace", "trace_file", type=OutFile(), help="Write them as a Chrome trace.")
def command(
    json_file: Path | None, save_profile: Path | None, plot: Path | None, trace_file: Path | None, **asked: Any
) -> None:
    """Measure every strategy of overlap beside its prediction; compute is emulated by sleeping.

    Start the ranks with -n/--ranks, or with mpirun: mpirun -n P python -m mpips.bench.overlap. How much of one
    allreduce hides behind compute is measured by `mpips bench iallreduce`.
    """
    check(MPI.COMM_WORLD.size, **asked)
    wanted = Wanted(**asked)
    job, found = run(wanted)
    job.kv.close()  # before files are written: nobody waits where that fails
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


class Found(NamedTuple):
    """What was measured: strategies, rank 0's iterations, profiles by kind of push, and the share of idle cores."""

    results: list[Result]
    traces: dict[str, list[Task]]
    profiles: dict[str, Profile]
    cores_idle: float


def run(wanted: Wanted) -> tuple[Job, Found]:
    """The job, and what it has measured. Collective."""
    if MPI.COMM_WORLD.rank == 0:
        click.echo("overlap: what messages cost", err=True)
    job, costs = _job(wanted)
    results: list[Result] = []
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
        more, drawn = measure(job, pushes, profiles[pushes], wanted.iterations)
        results += more
        traces |= drawn
    idle = idle_seconds() - idle
    return job, Found(results, traces, profiles, float(idle[0] / idle[1]))


def _job(wanted: Wanted) -> tuple[Job, tuple[float, ...]]:
    """A job whose layers weigh and compute as asked, and what its messages cost. Collective."""
    elements, shares = settings.shape(wanted.setting, wanted.layers, wanted.kilobytes)
    job = Job(wanted.servers, elements, wanted.asleep)
    costs = job.costs(wanted.repeats)
    if wanted.startups is not None:
        fitting = settings.kilobytes(costs[0], costs[1], wanted.startups)
        job.hold(settings.shape(wanted.setting, wanted.layers, fitting).elements)
        costs = job.costs(wanted.repeats)
    communication = _communication(costs, job)
    if wanted.startups is not None:
        communication = len(elements) * costs[0] / wanted.startups  # that startups weigh exactly as asked
    job.sleep_for(settings.compute_seconds(wanted.setting, wanted.weight, communication), shares)
    return job, costs


def _communication(costs: tuple[float, ...], job: Job) -> float:
    """Seconds of one message a layer, pushes and, with servers, pulls."""
    nbytes = PARAMETER_BYTES * sum(job.elements)
    one_way = [len(job.elements) * startup + nbytes * per_byte for startup, per_byte in (costs[:2], costs[2:])]
    return one_way[0] if link_of(job) is None else sum(one_way)


def _about(wanted: Wanted, job: Job, profiles: dict[str, Profile]) -> dict[str, Any]:
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
        "setting": wanted.setting, "workers": job.kv.num_workers, "servers": wanted.servers,
        "layers": len(job.elements), "bytes": float(dense.nbytes.sum()), "compute_s": compute_s,
        "compute": "emulated by sleeping",
    } | costs  # fmt: skip


def _show(results: list[Result], about: dict[str, Any]) -> None:
    terminal = console()
    for name, value in about.items():
        terminal.print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    table = Table("pushes", "strategy", "messages", "predicted ms", "measured ms", "measured / predicted",
                  "hidden, predicted", "hidden, measured", "measured / best",
                  caption="hidden: the share of the messages' time that lies beside compute")
    for column in table.columns[2:]:
        column.justify = "right"
    best = min(result.measured_s for result in results)
    for r in results:
        table.add_row(r.pushes, r.strategy, " + ".join(map(str, r.messages)), f"{1e3 * r.predicted_s:.2f}",
                      f"{1e3 * r.measured_s:.2f}", f"{r.measured_s / r.predicted_s:.3f}", f"{r.predicted_hidden:.0%}",
                      f"{r.measured_hidden:.0%}", f"{r.measured_s / best:.3f}")
    show_table(table, terminal)


if __name__ == "__main__":
    command()
