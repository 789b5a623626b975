"""`mpips chaos`: make faults on purpose in a running job, by a plan that can be replayed, and report on them."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.table import Table

from mpips import chaos
from mpips.chaos.report import began_at, notes_of
from mpips.collectives import files
from mpips.collectives.terminal import Interruptible, OutFile, Picture, console, show_table, writing

Names = tuple[str, ...]
PROGRESS_SECONDS = 3.0


class _Names(click.ParamType):
    """A list of names from a fixed set, separated by commas."""

    name = "names"

    def __init__(self, known: Names) -> None:
        self._known = known

    def convert(self, value: str | Names, param: click.Parameter | None, ctx: click.Context | None) -> Names:
        names = tuple(value.split(",")) if isinstance(value, str) else value
        if unknown := [name for name in names if name not in self._known]:
            self.fail(f"{unknown[0]!r} is none of {', '.join(self._known)}", param, ctx)
        return names


@click.command("chaos", cls=Interruptible, context_settings={"allow_interspersed_args": False})
@click.option("--seed", default=0, show_default=True, help="Determines the plan that is drawn.")
@click.option("--faults", default=1, show_default=True, type=click.IntRange(0), help="Number of faults.")
@click.option(
    "--every",
    default=10.0,
    show_default=True,
    type=click.FloatRange(0.001),
    help="Mean of the seconds between two faults, and between the first store and the first fault.",
)
@click.option(
    "--kinds",
    default="kill",
    show_default=True,
    type=_Names(chaos.KINDS),
    help="Kinds of faults, with commas: kill, stop (SIGSTOP), full (no file can grow); in a lab also host (all ranks "
    "of a host are killed), cut (its NICs are down) and slow (its NICs have a part of their rate).",
)
@click.option(
    "--roles",
    default="any",
    show_default=True,
    type=_Names(chaos.ROLES),
    help="Roles of the ranks that are hit, with commas: any, worker, server, spare.",
)
@click.option(
    "--lasting",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0.001),
    help="Seconds that a stop, a full disk, a cut or a slow link lasts.",
)
@click.option("--lab", default="", metavar="NAME", help="The lab in which COMMAND runs its job, for faults of hosts.")
@click.option("--save", "saved", type=OutFile(), help="Write the plan to this file.")
@click.option("--replay", type=click.Path(), help="Take the plan from this file instead.")
@click.option(
    "--limit",
    default=600.0,
    show_default=True,
    type=click.FloatRange(0.001),
    help="Seconds after which the job counts as hung, and is ended.",
)
@click.option(
    "--reference",
    is_flag=True,
    help="First run it without faults, and compare the bits of the notes of both runs.",
)
@click.option("--json", "record", type=OutFile(), help="Write the report to this file.")
@click.option("--picture", type=Picture(), help="Draw the numbers that worker 0 noted against time; needs matplotlib.")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND [ARGS]...")
def command(
    seed: int,
    faults: int,
    every: float,
    kinds: Names,
    roles: Names,
    lasting: float,
    lab: str,
    saved: Path | None,
    replay: str | None,
    limit: float,
    reference: bool,
    record: Path | None,
    picture: Path | None,
    argv: tuple[str, ...],
) -> None:
    """Run COMMAND, such as `mpips run -w 4 train.py`, and make faults in its ranks, on this machine or a lab's hosts.

    If the job's program calls `mpips.chaos.note(step, loss)` at the beginning of each step, the report says how long
    the job took to go on after each fault, and whether the noted bits differ. The exit code is 0 only if the job ended
    well and left nothing behind, and no bits differ.
    """
    try:
        plan = chaos.load(replay) if replay else chaos.draw(seed, faults, every, kinds, roles, lasting)
        chaos.check_lab(plan, lab)
    except chaos.PlanError as error:
        raise click.UsageError(str(error)) from None
    if saved:
        with writing(saved):
            chaos.save(plan, saved)
    without = watched(argv, chaos.FaultPlan(), limit, lab, "without faults") if reference else None
    if without is not None and (without.code or without.hung):
        raise click.ClickException(f"the job without faults {'hung' if without.hung else f'ended with {without.code}'}")
    run = watched(argv, plan, limit, lab, "with faults")
    report = chaos.judge(run, without)
    _show(report)
    if record:
        with writing(record):
            files.write(record, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if picture:
        with writing(picture):
            draw(picture, run, without)
    sys.exit(0 if report.good else 1)


def watched(command_line: Sequence[str], plan: chaos.FaultPlan, limit: float, lab: str, what: str) -> chaos.WatchedRun:
    """Run a command under a plan of faults and return the run. Prints a line of progress every `PROGRESS_SECONDS`.

    `what` is "with faults" or "without faults", for this line. Raises UsageError if the command cannot be run.
    """
    printed = time.monotonic()

    def look(run: chaos.WatchedRun) -> None:
        nonlocal printed
        if (now := time.monotonic()) >= printed + PROGRESS_SECONDS:
            printed = now
            steps = [message.step for message in run.messages if isinstance(message, chaos.ProgramNote)]
            step = f", step {max(steps)}" if steps else ""
            click.echo(f"mpips chaos: {what}, {now - run.began:.0f} s{step}", err=True)

    program, *options = command_line
    argv = [sys.executable, "-P", "-m", "mpips.launch.cli", *options] if program == "mpips" else list(command_line)
    try:
        return chaos.watch(argv, plan, limit, lab=lab, look=look)
    except OSError as error:
        raise click.UsageError(f"{program} cannot be run: {error.strerror}") from None


def _show(report: chaos.ChaosReport) -> None:
    table = Table(title=f"Faults, seed {report.seed}")
    for column in ("fault", "whom", "at, s", "goes on after, s"):
        table.add_column(column, justify="right" if column.endswith(", s") else "left")
    for fault in report.faults:
        if fault.undone:
            table.add_row(fault.kind, f"not made: {fault.undone}", "", "")
        else:
            seconds = "-" if fault.seconds is None else f"{fault.seconds:.3f}"
            place = f" on {fault.host}" if fault.host else ""
            table.add_row(fault.kind, f"rank {fault.rank} ({fault.role}){place}", f"{fault.at:.3f}", seconds)
    out = console()
    show_table(table, out)
    p50, p99 = report.percentile(50), report.percentile(99)
    if p50 is not None:
        out.print(f"seconds to go on: p50 {p50:.3f}, p99 {p99:.3f}")
    out.print(f"rounds done again: {report.repeated}; steps that nobody noted: {report.skipped}")
    out.print(f"bits: {report.bits or 'not compared (--reference)'}")
    how = "hung, and was ended" if report.hung else f"ended with {report.code}"
    out.print(f"the job {how} after {report.seconds:.1f} s; left behind: {', '.join(report.left) or 'nothing'}")


INCHES = (7.0, 4.0)


def draw(path: Path, run: chaos.WatchedRun, reference: chaos.WatchedRun | None = None) -> None:
    """Draw a picture of the values that worker 0 has noted, with and without faults. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    if reference is not None:
        axes.plot(*curve(reference), color="0.6", linewidth=3, label="without faults")
    axes.plot(*curve(run), color="tab:blue", label="with faults")
    began = began_at(run)
    for place, attempt in enumerate(attempt for attempt in run.attempts if not attempt.undone):
        kind = run.plan.faults[attempt.fault].kind
        axes.axvline(attempt.time - began, color="tab:red", linestyle=":", label="" if place else "a fault")
        axes.text(
            attempt.time - began,
            1.0,
            f"{kind} {attempt.rank}",
            transform=axes.get_xaxis_transform(),
            fontsize=7,
            rotation=90,
            va="top",
            ha="right",
        )
    axes.set_xlabel("seconds since the first store was made")
    axes.set_ylabel("noted")
    axes.legend()
    files.write_picture(path, figure)


def curve(run: chaos.WatchedRun) -> tuple[list[float], list[float]]:
    """Return the times and the values of the numbers that worker 0 has noted.

    The times count from the first store. After a recovery another process may be worker 0. Its notes are included.
    """
    began = began_at(run)
    noted = [(note.time, note.value) for note in notes_of(run) if note.worker == 0 and note.value is not None]
    return [time - began for time, _ in noted], [value for _, value in noted]


if __name__ == "__main__":
    command()
