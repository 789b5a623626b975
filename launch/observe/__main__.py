"""The commands that look at a job from outside: `mpips why` (why it is stuck), `top`, `page`, `trace` and `metrics`."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mpips.collectives.recorder import dump, folders, own
from mpips.collectives.terminal import Interruptible, OutFile, Seconds, console, parse_address, show_table, writing
from mpips.launch.observe.explain import as_json, explain, missed_rounds
from mpips.launch.observe.gather import Rank, has_living, has_pages, jobs, read_end
from mpips.launch.observe.hosts import WITHIN_SECONDS, Found, Watch

MEGA = 1e6
# the file of a dump that has the explanation of the job
WHY = "why.json"
# how many other jobs to name
MOST_NAMED = 8
job_argument = click.argument("job", required=False)
within_option = click.option(
    "--within", type=Seconds(), default=WITHIN_SECONDS, show_default=True, help="For other hosts to answer."
)
json_option = click.option("--json", "with_json", is_flag=True, help="Print JSON.")


def find(job: str | None) -> Path:
    """Return the folder of a job. `job` is its name, a path, or a scheduler's job number; None is the newest job.

    Raises UsageError if there is no such job, or if several jobs run in that allocation.
    """
    # isdir is False for a folder that this user may not see.
    if job and os.path.isdir(job):
        return Path(job)
    known = jobs()
    if job:
        for path in known:
            if path.name == job:
                return path
        within = [path for path in known if path.name.startswith(f"{job}.")]
        within = [path for path in within if has_living(path)] or within
        if len(within) == 1:
            return within[0]
        if within:
            raise click.UsageError(
                f"{len(within)} jobs of yours are in {job}: name one of {', '.join(path.name for path in within)}"
            )
        if _has_no_pages(job):
            raise click.UsageError(
                f"job {job} runs with {own.VARIABLE}=0, so its ranks have no pages, and nothing is "
                "seen of them: start it without that variable"
            )
        if _is_launcher(job):
            raise click.UsageError(
                f"job {job} runs, and none of its ranks here has a page: none has begun mpips yet, "
                "or all have ended their programs"
            )
        names = ", ".join(path.name for path in known) or "none"
        raise click.UsageError(f"there is no job {job!r} of yours on this machine; known: {names}")
    if not known:
        raise click.UsageError(
            "no job of yours runs on this machine, or has ended otherwise than well: look on the "
            f"host where its ranks are (with {own.VARIABLE}=0 ranks are not seen)"
        )
    return next((path for path in reversed(known) if folders.is_launched_here(path) or has_pages(path)), known[-1])


def _has_no_pages(job: str) -> bool:
    """True if `job` is the pid of an `mpips run` that has switched pages off."""
    with suppress(OSError):
        return job.isdigit() and f"{own.VARIABLE}=0".encode() in Path(f"/proc/{job}/environ").read_bytes().split(b"\0")
    return False


def _is_launcher(job: str) -> bool:
    """True if `job` is the pid of a running `mpips run` of this user."""
    with suppress(OSError):
        process = Path(f"/proc/{job}")
        words = process.joinpath("cmdline").read_bytes().split(b"\0") if job.isdigit() else []
        named = any(
            word == b"run" and os.path.basename(before) in (b"mpips", b"launch.cli", b"mpips.launch.cli")
            for before, word in itertools.pairwise(words)
        )
        return named and os.path.basename(words[0])[:6] == b"python" and process.stat().st_uid == os.getuid()
    return False


@click.group("observe")
def command() -> None:
    """Look at a job of this user on this machine."""


@command.command("why", cls=Interruptible)
@job_argument
@json_option
@click.option("--seconds", type=Seconds(), default=0.5, show_default=True, help="Between the two looks.")
@click.option("--dump", "into", type=click.Path(file_okay=False, path_type=Path), help="Write all that is known there.")
@click.option(
    "--format",
    "how",
    type=click.Choice(["json", "pytorch"]),
    default="json",
    show_default=True,
    help="Of --dump: files rank-N.json, or files rank_N for torchfrtrace.",
)
@within_option
def why(job: str | None, with_json: bool, seconds: float, into: Path | None, how: str, within: float) -> None:
    """Say what JOB does, or why it stands, or has ended: who waits in what for whom, and what that rank does.

    JOB is the name that `mpips top` shows, or a folder of pages or of a dump; without it, the newest. Nothing is
    stopped. Ranks on other hosts are asked, too, where `mpips run` has started them.
    """
    folder = find(job)
    if (folder / WHY).is_file():
        click.echo(_read_dump(folder / WHY, with_json))
        return
    with Watch(folder, within) as watch:
        ranks, unreached = _gathered(watch, folder, seconds)
    found = explain(folder.name, ranks, read_end(folder), unreached)
    known = as_json(folder.name, found, ranks, unreached)
    if into is not None:
        _dump(folder, into, how, known)
    click.echo(json.dumps(known, indent=1) if with_json else found.sentence)
    if job is None:
        _tell_of_others(folder, "why")


def _read_dump(path: Path, with_json: bool) -> str:
    """Return the explanation that `--dump` has written: the sentence, or the whole file `with_json`.

    Raises UsageError if `--dump` has not written this file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        sentence = str(json.loads(text)["sentence"])
    except (OSError, ValueError, KeyError, TypeError):
        raise click.UsageError(
            f"{path} is no dump, or is damaged: name a folder that `mpips why JOB --dump DIR` has written"
        ) from None
    return text if with_json else sentence


def _tell_of_others(folder: Path, command: str) -> None:
    """If other jobs run too, say on standard error that the newest one was chosen."""
    others = [path.name for path in jobs() if path != folder and has_living(path)]
    if others:
        named = ", ".join(others[-MOST_NAMED:]) + ", ..." * (len(others) > MOST_NAMED)
        jobs_run = f"jobs {named} run" if len(others) > 1 else f"job {named} runs"
        click.echo(f"(This is your newest job here; {jobs_run}, too: name one by `mpips {command} JOB`.)", err=True)


def _dump(folder: Path, into: Path, how: str, known: dict[str, Any]) -> None:
    """Write what is known about a job into the folder `into`. Raises UsageError if it cannot be written.

    Args:
        folder: The folder of the job.
        into: The folder to write to.
        how: "json" or "pytorch", the format of the files.
        known: What `as_json` has returned.
    """
    pages = (folder / f"{one['pid']}{folders.PAGE}" for one in known["ranks"])
    # Ranks on other hosts have no page here. They are in `known` only.
    paths = [path for path in pages if path.exists()]
    try:
        if how == "pytorch":
            dump.write_for_pytorch([rank for path in paths if (rank := dump.read_rank(path)) is not None], into)
            # Only ranks of a store have roles.
            if any(one.get("role") for one in known["ranks"]):
                said = "torchfrtrace reads collectives, not calls of stores: `mpips why` says who waits in one"
                click.echo(f"note: {said}", err=True)
            return
        for path in paths:
            dump.write_rank(path, into)
        dump.write_json(into / WHY, known)
    except OSError as error:
        raise click.UsageError(f"--dump {into} cannot be written: {error.strerror or error}") from None


@command.command("top", cls=Interruptible)
@job_argument
@click.option("--once", is_flag=True, help="Show the table once, and leave.")
@json_option
@click.option("--every", type=Seconds(), default=1.0, show_default=True, help="Between two tables.")
@within_option
def top(job: str | None, once: bool, with_json: bool, every: float, within: float) -> None:
    """Show the ranks of JOB: role, step, steps a second, share of time that they wait, processor, memory, last call.

    JOB is a name that this command shows, or a folder of pages; without it, the newest. Ctrl-C ends it.
    """
    folder, terminal = find(job), console()
    with Watch(folder, within) as watch:
        if once or with_json:
            ranks, unreached = _gathered(watch, folder, every)
            found = explain(folder.name, ranks, read_end(folder), unreached)
            if with_json:
                click.echo(json.dumps(as_json(folder.name, found, ranks, unreached), indent=1))
            else:
                for table in _tables(folder.name, ranks, terminal.width):
                    show_table(table)
                click.echo(found.sentence)
            if job is None:
                _tell_of_others(folder, "top")
            return
        shown = Live(console=terminal, screen=False, auto_refresh=False) if terminal.is_terminal else nullcontext()
        with shown as live:
            lives = True
            while lives:
                ranks, unreached = _gathered(watch, folder, every)
                tables = _tables(folder.name, ranks, terminal.width)
                found = explain(folder.name, ranks, read_end(folder), unreached)
                if live is not None:
                    live.update(Group(*tables, Text(found.sentence)), refresh=True)
                else:
                    # Not a terminal: print one table after the other.
                    for table in tables:
                        show_table(table)
                    click.echo(f"{found.sentence}\n")
                lives = bool(unreached) or any(one.lives for one in ranks)


@command.command("page", cls=Interruptible)
@job_argument
@click.option("--port", metavar="[HOST:]PORT", default="0", help="Without a host the loopback; 0: any free port.")
def page(job: str | None, port: str) -> None:
    """Serve a live page of JOB for a browser, at an address with a token, until Ctrl-C.

    JOB is a name that `mpips top` shows; without it, the newest. `mpips run --page PORT` does it for a job it starts.
    """
    from mpips.launch.observe.live import serving

    with serving(port, find(job)) as address:
        click.echo(address)
        while True:
            time.sleep(3600)


@command.command("trace", cls=Interruptible)
@job_argument
@click.option("--seconds", type=Seconds(), default=5.0, show_default=True, help="How long, from now.")
@click.option("-o", "--output", type=OutFile(), default="trace.json", show_default=True, help="The file.")
def trace(job: str | None, seconds: float, output: Path) -> None:
    """Write one timeline of what all ranks of JOB do from now on, for Perfetto and chrome://tracing.

    JOB is the name that `mpips top` shows; without it, the newest. `mpips run --trace` does it for a whole job. Ranks
    on other hosts are in it, too, where `mpips run` has started them.
    """
    # Imported late: the other commands do not need what it imports.
    from mpips.launch.observe.trace import trace_running, write

    found = trace_running(find(job), seconds)
    with writing(output):
        write(output, found)


@command.command("metrics", cls=Interruptible)
@click.option("--dir", "folder", type=click.Path(exists=True, file_okay=False), help="Write mpips.prom there.")
@click.option("--port", metavar="[HOST:]PORT", help="Serve at http://HOST:PORT/metrics; HOST is the loopback.")
@click.option("--every", type=Seconds(), default=15.0, show_default=True, help="Between two files.")
@click.option("--once", is_flag=True, help="Write once, and leave; without --dir to standard output.")
def metrics(folder: str | None, port: str | None, every: float, once: bool) -> None:
    """Export metrics of all jobs of yours on this host for Prometheus. Ctrl-C ends it.

    Needs the extra `metrics`. `mpips run --metrics DIR` does it for one job.
    """
    exporter = _exporter()
    if folder is None and port is None and not once:
        raise click.UsageError("say where: --dir DIR, --port PORT, or --once")
    if once and port is not None:
        raise click.UsageError(f"--once leaves at once, and --port {port} serves until Ctrl-C: leave one of them out")
    try:
        with ExitStack() as stack:
            if port is not None:
                host, number = parse_address(port)
                served = stack.enter_context(exporter.serving(host, number))
                click.echo(f"serving http://{host}:{served}/metrics", err=True)
            while True:
                if folder is not None:
                    exporter.write(Path(folder))
                elif once:
                    click.echo(exporter.text(), nl=False)
                if once:
                    return
                time.sleep(every)
    except OSError as error:
        raise click.UsageError(f"metrics cannot go there: {error.strerror or error}") from None


def _exporter() -> Any:
    """Import the module of metrics. Raises UsageError if prometheus_client is not installed."""
    try:
        return importlib.import_module("mpips.launch.observe.metrics")
    except ModuleNotFoundError as error:
        raise click.UsageError(f"metrics need {error.name}: pip install 'mpips[metrics]'") from None


def _gathered(watch: Watch, folder: Path, seconds: float) -> Found:
    """Look at a job, and raise UsageError if no rank can be seen."""
    found = watch.look(seconds)
    if not found.ranks and found.unreached:
        mute = (f"host {host} does not answer: {why}" for host, why in found.unreached.items())
        raise click.UsageError("; ".join(mute))
    if not found.ranks:
        raise click.UsageError(f"{folder} holds no page of a rank: it is no job's folder, or the job has ended well")
    return found


# The columns of the table of ranks, most useful ones first. If the terminal is too narrow, the last ones are left out.
COLUMNS = (
    "rank",
    "state",
    "where",
    "step",
    "steps/s",
    "waits",
    "for",
    "missed",
    "exchanges",
    "CPU",
    "MB/s",
    "queue",
    "step age",
    "role",
    "MB",
    "pid",
    "host",
)
# the order in which they are shown
ORDER = (
    "rank",
    "role",
    "host",
    "pid",
    "state",
    "step",
    "steps/s",
    "step age",
    "waits",
    "for",
    "missed",
    "exchanges",
    "CPU",
    "MB/s",
    "queue",
    "MB",
    "where",
)
# the columns of the second table, which shows the store's embedding tables; most useful ones first
ROWS = (
    "table",
    "rank",
    "rows",
    "MB",
    "rows/s",
    "pushed/s",
    "pulled/s",
    "in place",
    "room MB",
    "evicted",
    "refused",
    "counted",
    "no memory",
)
# columns that are left out if they are empty
RARE = ("missed", "exchanges", "evicted", "refused", "counted", "no memory")
# columns that are justified to the left
WORDS = ("role", "host", "state", "where", "for", "table")
# Longer texts of the column "where" may be cut, but not to less than this.
WHERE_WIDTH = 30


def _tables(name: str, ranks: Sequence[Rank], width: int) -> list[Table]:
    """Return the table of a job's ranks and, if it has embedding tables, the table of these."""
    missed = missed_rounds(ranks)
    rows = [_row(one, missed.get(one.rank, 0.0)) for one in ranks]
    tables = [
        row
        for table in dict.fromkeys(table for one in ranks for table in one.tables)
        for one in ranks
        if table in one.tables and one.lives
        for row in [_table_row(table, one)]
    ]
    first = _view(f"job {name}", rows, COLUMNS, ORDER, width)
    return [first, _view("tables", tables, ROWS, ROWS, width)] if tables else [first]


def _table_row(table: str, one: Rank) -> dict[str, str]:
    """Return the row of one embedding table on one rank: column -> text."""
    numbers, rates = one.tables[table], one.table_rates.get(table, {})
    row = dict.fromkeys(ROWS, "") | {"table": table, "rank": str(one.rank)}
    if one.role == "server":
        return row | {
            "rows": f"{numbers['rows']:,}",
            "MB": f"{numbers['bytes'] / MEGA:.3g}",
            "rows/s": _rate(rates, "rows"),
            "room MB": f"{one.room_bytes / MEGA:.0f}",
            **{word: f"{numbers[word]:,}" if numbers[word] else "" for word in ("evicted", "refused", "counted")},
        }
    pulled = numbers["in_place"] + numbers["asked"]
    return row | {
        "pushed/s": _rate(rates, "pushed"),
        "pulled/s": _rate(rates, "asked", "in_place"),
        "in place": f"{100 * numbers['in_place'] / pulled:.0f} %" if pulled else "",
        "no memory": f"{numbers['refused_pushes']:,}" if numbers["refused_pushes"] else "",
    }


def _rate(rates: Mapping[str, float], *words: str) -> str:
    return f"{sum(rates[word] for word in words):,.0f}" if rates else ""


def _view(
    title: str, rows: Sequence[Mapping[str, str]], columns: Sequence[str], order: Sequence[str], width: int
) -> Table:
    """Make a table that is at most `width` wide, if at least three columns fit.

    Args:
        title: The title of the table.
        rows: column -> text, for each row.
        columns: The columns, most useful ones first; those that do not fit are dropped from the end.
        order: The columns in the order in which they are shown.
        width: The width of the terminal.
    """
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in order}
    if "where" in widths:
        widths["where"] = min(widths["where"], WHERE_WIDTH)
    fitting = [column for column in columns if column not in RARE or any(row[column] for row in rows)]
    while len(fitting) > 3 and sum(widths[column] + 3 for column in fitting) > width:
        fitting.pop()
    view = Table(title=title)
    shown = [column for column in order if column in fitting]
    for column in shown:
        view.add_column(column, justify="left" if column in WORDS else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        state = row.get("state")
        style = "red" if state in ("gone", "stopped") else "yellow" if state == "waits" else ""
        view.add_row(*(row[column] for column in shown), style=style)
    return view


def _row(one: Rank, missed: float) -> dict[str, str]:
    """Return the row of a rank: column -> text. `missed`: the share of the quorum's rounds that it came late to."""
    state = "gone" if not one.lives else "stopped" if one.stopped else "waits" if one.waits else "runs"
    stepped = one.step >= 0
    rate = f"{one.step_rate:.1f}" if one.step_rate >= 0 else f"<{1 / max(one.step_seconds, 1e-3):.1g}"
    exchanged = one.exchanged_bytes / max(one.exchanges, 1) / MEGA
    return {
        "missed": f"{100 * missed:.0f} %" if missed else "",
        "exchanges": f"{one.exchanges}, {exchanged:.3g} MB, {one.exchange_seconds:.0f} s ago" * (one.exchanges > 0),
        "rank": str(one.rank),
        "role": one.role,
        "host": one.host,
        "pid": str(one.pid),
        "state": state,
        "step": str(one.step) if stepped else "",
        "steps/s": rate if one.lives and stepped else "",
        "step age": f"{one.step_seconds:.0f} s" if stepped else "",
        "waits": f"{100 * one.waiting:.0f} %" if one.lives else "",
        "for": ",".join(map(str, one.waits[0].late[:4])) if one.waits else "",
        "CPU": f"{100 * one.cpu:.0f} %" if one.lives else "",
        "MB/s": f"{one.byte_rate / MEGA:.3g}" if one.lives and one.byte_rate >= 0 else "",
        "queue": str(one.queued) if one.lives and one.queued >= 0 else "",
        "MB": f"{one.memory_bytes / MEGA:.0f}" if one.lives else "",
        "where": one.waits[0].what if one.waits else str(one.user_frame or one.last_call),
    }


if __name__ == "__main__":
    command()
