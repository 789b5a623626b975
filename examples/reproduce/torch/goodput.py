"""Measures what faults cost a training job: its samples a second with a fault every 29 s, and without faults.

    python -m examples.reproduce.torch.goodput [--replicas 8] [--minutes 30] [--every 29] [--out out] [--quick]

One job trains a small transformer by DistributedDataParallel over process groups that can be created again. Its parts
are without faults, with faults, and without faults again. Every second fault kills a replica, and a spare takes its
place. The other faults stop a replica (SIGSTOP) for 10 s. The stopped replica does not answer within the timeout of the
group, so a spare takes its place. When it wakes, it becomes a spare. The samples of a step count once, however often
the step is repeated.

Two comparisons give the goodput, that is, the speed with faults as a share of the speed without them. The first is with
the parts without faults. The machine's speed may change between the parts, so the second is within the part with
faults, with the seconds in which no fault has an effect.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist
from rich.table import Table

from collectives import files
from collectives.terminal import Interruptible, show_table
from examples.reproduce.results import leave, out_option
from mpips import chaos

NAME = "reproduce-goodput"
# number of sequences that a replica trains on in a step
BATCH = 16
# seconds of steps before anything is measured
SETTLE_SECONDS = 20.0
# Training ends this many steps after the latest step that the driver knows. Meanwhile every replica looks for the end.
LAST_STEPS = 200
# seconds that the job may take to start and to end
MARGIN_SECONDS = 900.0
# The longest pause between two steps after a fault is searched within this many seconds.
AFTER_SECONDS = 9.0
# seconds over which each point in the picture is averaged
POINT_SECONDS = 5.0
# A point counts as undisturbed if no kill is within this many seconds before it, and no stop or end of a stop.
RECOVERY_SECONDS = 2.0


class Faults:
    """Makes the faults, and knows when each part of the run has begun. `look` is called several times a second."""

    def __init__(
        self, store: dist.Store, ranks: Sequence[int], parts: Sequence[float], every: float, stopped: float
    ) -> None:
        self._store = store
        # the numbers of replicas and of spares in the job
        self._replicas, self._spares = ranks
        # the seconds that the parts take: to settle, without faults, with faults, without faults
        self._parts = parts
        self._every = every
        self.stop_seconds = stopped
        self._random = random.Random(1)
        # the times at which the parts begin, and at which the last one ends
        self.times: list[float] = []
        # the faults made so far: (time, kind, rank)
        self.made: list[tuple[float, str, int]] = []
        # pid of a stopped process -> time at which the process continues
        self._stopped: dict[int, float] = {}
        self._over = False

    def look(self, run: chaos.WatchedRun) -> None:
        now, size = time.monotonic(), self._replicas + self._spares
        if not self.times:
            # The replicas train while the last spares start.
            if self._store.check(["members", *(f"spare/{rank}" for rank in range(self._replicas, size))]):
                self.times = [now + sum(self._parts[:part]) for part in range(len(self._parts) + 1)]
            return
        for pid, until in list(self._stopped.items()):
            if now >= until:
                os.kill(pid, signal.SIGCONT)
                del self._stopped[pid]
        _, _, begin, end, over = self.times
        if now >= over and not self._over:
            self._over = True
            latest = max(message.step for message in run.messages[-1000:] if isinstance(message, chaos.ProgramNote))
            self._store.set("last", str(latest + LAST_STEPS))
        if self._over:
            # A spare that ended now would wait in MPI_Finalize until training has ended.
            if not any(self._store.check([f"end/{rank}"]) for rank in range(size)):
                return
            for rank in range(size):
                if self._store.check([f"spare/{rank}"]):
                    handle = self._store.get(f"spare/{rank}").decode()
                    self._store.compare_set(f"call/{handle}", "", "end")
        elif begin + (len(self.made) + 0.5) * self._every <= now < end:
            rank = self._random.choice(json.loads(self._store.get("members")))
            pid = int(self._store.get(f"pid/{rank}"))
            kind = ("kill", "stop")[len(self.made) % 2]
            self.made.append((now, kind, rank))
            if kind == "kill":
                os.kill(pid, signal.SIGKILL)
            else:
                self._stopped[pid] = now + self.stop_seconds
                os.kill(pid, signal.SIGSTOP)
            click.echo(f"fault {len(self.made)}: {kind} of rank {rank}", err=True)

    def end(self) -> None:
        """Let all stopped processes continue."""
        for pid in self._stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def samples(notes: Sequence[chaos.ProgramNote], begin: float, end: float) -> int:
    """Return the samples of all steps that were done between two times. A repeated step counts once."""
    within = [(before, note) for before, note in pairwise(notes) if begin <= note.time < end]
    return sum((note.step - before.step) * note.workers * BATCH for before, note in within)


def summarize(notes: Sequence[chaos.ProgramNote], faults: Faults) -> dict[str, Any]:
    """Return the figures of a run. Times are seconds since the part without faults began."""
    _, start, begin, end, over = faults.times
    without = (samples(notes, start, begin) + samples(notes, end, over)) / (begin - start + over - end)
    during = samples(notes, begin, end) / (end - begin)
    times = [note.time for note in notes]

    def longest_gap(at: float) -> float:
        near = [time for time in times if at - 1 <= time < at + AFTER_SECONDS]
        return max((after - before for before, after in pairwise(near) if after > at), default=math.inf)

    points = []
    for number in range(int((over - start) / POINT_SECONDS)):
        first = start + number * POINT_SECONDS
        last = first + POINT_SECONDS
        losses = [note.value for note in notes if first <= note.time < last and note.value is not None]
        if losses:
            middle = first - start + POINT_SECONDS / 2
            points.append((middle, samples(notes, first, last) / POINT_SECONDS, statistics.mean(losses)))
    made = [
        {"at": at - start, "kind": kind, "rank": rank, "seconds": longest_gap(at)} for at, kind, rank in faults.made
    ]
    undisturbed = rate_between_faults(points, made, faults.stop_seconds, begin - start, end - start)
    return {
        "samples_per_second_with": during,
        "samples_per_second_without": without,
        "samples_per_second_between": undisturbed,
        "goodput": during / without,
        "goodput_between": during / undisturbed if undisturbed else None,
        "part_seconds": [begin - start, end - begin, over - end],
        "faults": made,
        "points": points,
    }


def rate_between_faults(
    points: Sequence[tuple[float, float, float]],
    made: Sequence[dict[str, Any]],
    stop_seconds: float,
    begin: float,
    end: float,
) -> float | None:
    """Return the samples a second at the points between two times on which no fault has an effect. None: no such point.

    Args:
        points: (seconds, samples a second, loss).
        made: The faults, with the keys "at" (seconds) and "kind".
    """

    def is_free(second: float) -> bool:
        first, last = second - POINT_SECONDS / 2, second + POINT_SECONDS / 2
        ends = ((fault["at"], fault["at"] + stop_seconds * (fault["kind"] == "stop")) for fault in made)
        return all(last <= at or first >= until + RECOVERY_SECONDS for at, until in ends)

    rates = [rate for second, rate, _ in points if begin <= second < end and is_free(second)]
    return statistics.mean(rates) if rates else None


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--replicas", default=8, type=click.IntRange(2), help="Ranks that train.")
@click.option("--minutes", default=30.0, type=click.FloatRange(0.1), help="Time with faults.")
@click.option("--every", default=29.0, type=click.FloatRange(1), help="Seconds between two faults.")
@click.option("--stopped", default=10.0, type=click.FloatRange(0.1), help="Seconds that a stop lasts.")
@click.option("--without", default=2.5, type=click.FloatRange(0.01), help="Minutes without faults before and after.")
@click.option("--timeout", default=0.3, type=click.FloatRange(0.1), help="Of the group, seconds.")
@click.option("--quick", is_flag=True, help="2 replicas, 2 faults: shows that all of it works.")
@out_option
def command(
    replicas: int, minutes: float, every: float, stopped: float, without: float, timeout: float, quick: bool, out: Path
) -> None:
    """Train on 8 replicas while every 29 s one of them is killed or stopped for 10 s."""
    settle = SETTLE_SECONDS
    if quick:
        replicas, minutes, every, stopped, without, timeout, settle = 2, 0.4, 12.0, 6.0, 0.1, 2.0, 1.0
    seconds, pause = 60 * minutes, 60 * without
    # Every second fault kills a process and so needs a spare. One more spare replaces a stopped process, and one is
    # left over.
    spares = math.ceil(seconds / every / 2) + 2
    store = dist.TCPStore("localhost", 0, is_master=True, timeout=timedelta(days=1), wait_for_workers=False)
    faults = Faults(store, (replicas, spares), (settle, pause, seconds, pause), every, stopped)
    argv = [sys.executable, "-m", "launch.cli", "run", "-w", str(replicas), "--spares", str(spares)]
    argv += ["-m", "examples.reproduce.torch.goodput_ranks", str(store.port), str(replicas), str(BATCH), str(timeout)]
    limit = settle + seconds + 2 * pause + MARGIN_SECONDS
    try:
        run = chaos.watch(argv, chaos.FaultPlan(), limit, look=faults.look)
    finally:
        faults.end()
    if run.code or run.hung or not faults.times:
        raise click.ClickException("the job hung" if run.hung else f"the job ended with {run.code}")
    notes = [message for message in run.messages if isinstance(message, chaos.ProgramNote)]
    report = summarize(sorted(notes, key=lambda note: note.time), faults)
    ends = [f"end/{rank}" for rank in range(replicas + spares)]
    report["checksums"] = [store.get(key).decode() for key in ends if store.check([key])]
    report |= {"replicas": replicas, "spares": spares, "timeout_seconds": timeout, "left": run.left}
    show(report)
    leave(out, NAME, report, draw)
    if run.left or len(set(report["checksums"])) != 1:
        raise click.ClickException("something is left over, or the replicas' parameters differ at the end")


def show(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['replicas']} replicas, {report['spares']} spares")
    for column in ("fault", "times", "pause, s: median", "most"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for kind in ("kill", "stop"):
        gaps = [fault["seconds"] for fault in report["faults"] if fault["kind"] == kind]
        if gaps:
            table.add_row(kind, str(len(gaps)), f"{statistics.median(gaps):.2f}", f"{max(gaps):.2f}")
    show_table(table)
    during = report["samples_per_second_with"]
    click.echo(f"samples a second with faults: {during:.1f}")
    click.echo(
        f"in the parts without faults: {report['samples_per_second_without']:.1f}; goodput {report['goodput']:.4f}"
    )
    if (between := report["samples_per_second_between"]) is not None:
        click.echo(f"while no fault has an effect: {between:.1f}; goodput {report['goodput_between']:.4f}")
    losses = [loss for _, _, loss in report["points"]]
    tenth = max(1, len(losses) // 10)
    parts = [statistics.mean(losses[part : part + tenth]) for part in range(0, len(losses) - tenth + 1, tenth)]
    click.echo(f"loss in each tenth of the time: {', '.join(f'{loss:.3f}' for loss in parts)}")
    same = f"all {len(report['checksums'])} equal" if len(set(report["checksums"])) == 1 else "not equal"
    click.echo(f"parameters at the end: {same}; left over: {', '.join(report['left']) or 'nothing'}")


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the loss and the samples a second against time, with the faults."""
    from matplotlib.figure import Figure

    times, rates, losses = zip(*report["points"])
    minutes = [seconds / 60 for seconds in times]
    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(minutes, losses, "C0")
    above.set(ylabel="loss, nats a letter")
    below.plot(minutes, rates, "C0")
    below.set(xlabel="minutes", ylabel="samples a second", ylim=(0, None))
    for axes in (above, below):
        for kind, color in (("kill", "tab:red"), ("stop", "tab:orange")):
            at = [fault["at"] / 60 for fault in report["faults"] if fault["kind"] == kind]
            for number, minute in enumerate(at):
                axes.axvline(minute, color=color, linewidth=0.7, alpha=0.6, label="" if number else kind)
    above.legend()
    figure.suptitle(f"{report['replicas']} replicas, {len(report['faults'])} faults")
    files.write_picture(path, figure, dpi=90)


if __name__ == "__main__":
    command()
