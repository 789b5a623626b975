"""The commands that observe a job from outside: `mpips why`, `top`, `page`, `trace` and `metrics`.

The commands read the *pages* of the job's ranks: small files in the machine's memory in which the ranks write what they
do.
"""

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
from mpips.launch.observe.gather import Rank, has_live_ranks, has_pages, jobs, read_end
from mpips.launch.observe.hosts import WITHIN_SECONDS, JobView, JobWatch

MEGA = 1e6
# the file of a dump (`mpips why --dump`) that has the explanation of the job
WHY = "why.json"
# the largest number of other jobs that a message names
MOST_NAMED = 8
job_argument = click.argument("job", required=False)
within_option = click.option(
    "--within", type=Seconds(), default=WITHIN_SECONDS, show_default=True, help="Seconds for other hosts to answer."
)
json_option = click.option("--json", "with_json", is_flag=True, help="Print JSON.")


def find(job: str | None) -> Path:
    """Return the folder of a job.

    `job` is the name of the job, the path of its folder, or the number of the scheduler's job that contains it. None
    means the newest job. Raises UsageError if no such job is known, or if the scheduler's job contains several jobs.
    """
    # Unlike Path.is_dir, isdir returns False, and raises nothing, if this user may not read the path.
    if job and os.path.isdir(job):
        return Path(job)
    known = jobs()
    if job:
        for path in known:
            if path.name == job:
                return path
        within = [path for path in known if path.name.startswith(f"{job}.")]
        within = [path for path in within if has_live_ranks(path)] or within
        if len(within) == 1:
            return within[0]
        if within:
            raise click.UsageError(
                f"{len(within)} jobs of yours are in {job}: name one of {', '.join(path.name for path in within)}"
            )
        if _has_no_pages(job):
            raise click.UsageError(
                f"job {job} runs with {own.VARIABLE}=0, so its ranks have no pages, and nothing is "
                "known about them: start it without that variable"
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
            "no job of yours runs on this machine, and none has failed here: look on the host where "
            f"its ranks are (with {own.VARIABLE}=0 ranks are not seen)"
        )
    return next((path for path in reversed(known) if folders.is_launched_here(path) or has_pages(path)), known[-1])


def _has_no_pages(job: str) -> bool:
    """True if `job` is the pid of an `mpips run` whose ranks have no pages, because a variable switches pages off."""
    with suppress(OSError):
        return job.isdigit() and f"{own.VARIABLE}=0".encode() in Path(f"/proc/{job}/environ").read_bytes().split(b"\0")
    return False


def _is_launcher(job: str) -> bool:
    """True if `job` is the pid of a running `mpips run` of this user."""
    with suppress(OSError):
        process = Path(f"/proc/{job}")
        argv = process.joinpath("cmdline").read_bytes().split(b"\0") if job.isdigit() else []
        is_run = any(
            word == b"run" and os.path.basename(before) in (b"mpips", b"launch.cli", b"mpips.launch.cli")
            for before, word in itertools.pairwise(argv)
        )
        return is_run and os.path.basename(argv[0])[:6] == b"python" and process.stat().st_uid == os.getuid()
    return False


@click.group("observe")
def command() -> None:
    """Look at a job of this user on this machine."""


@command.command("why", cls=Interruptible)
@job_argument
@json_option
@click.option("--seconds", type=Seconds(), default=0.5, show_default=True, help="Time between the two looks.")
@click.option(
    "--dump",
    "into",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write everything that is known to this folder.",
)
@click.option(
    "--format",
    "how",
    type=click.Choice(["json", "pytorch"]),
    default="json",
    show_default=True,
    help="Format of --dump: files rank-N.json, or files rank_N for torchfrtrace.",
)
@within_option
def why(job: str | None, with_json: bool, seconds: float, into: Path | None, how: str, within: float) -> None:
    """Explain what JOB does, why it is stuck, or why it has ended: which ranks wait in which call for which ranks.

    JOB is the name that `mpips top` shows, or a folder of pages or of a dump. Default: the newest job. The job goes on
    while it is examined. If `mpips run` has started the job, its ranks on other hosts are included.
    """
    folder = find(job)
    if (folder / WHY).is_file():
        click.echo(_read_dump(folder / WHY, with_json))
        return
    with JobWatch(folder, within) as watch:
        ranks, unreached = _gather(watch, folder, seconds)
    explanation = explain(folder.name, ranks, read_end(folder), unreached)
    known = as_json(folder.name, explanation, ranks, unreached)
    if into is not None:
        _dump(folder, into, how, known)
    click.echo(json.dumps(known, indent=1) if with_json else explanation.sentence)
    if job is None:
        _print_other_jobs(folder, "why")


def _read_dump(path: Path, with_json: bool) -> str:
    """Return the sentence of a file that `--dump` has written or, with `with_json`, the whole file.

    Raises UsageError if `--dump` has not written this file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        sentence = str(json.loads(text)["sentence"])
    except (OSError, ValueError, KeyError, TypeError):
        raise click.UsageError(
            f"{path} is not a dump, or is damaged: name a folder that `mpips why JOB --dump DIR` has written"
        ) from None
    return text if with_json else sentence


def _print_other_jobs(folder: Path, command: str) -> None:
    """If other jobs are running as well, print on standard error that the newest job was chosen."""
    others = [path.name for path in jobs() if path != folder and has_live_ranks(path)]
    if others:
        named = ", ".join(others[-MOST_NAMED:]) + ", ..." * (len(others) > MOST_NAMED)
        jobs_run = f"jobs {named} run" if len(others) > 1 else f"job {named} runs"
        click.echo(f"(This is your newest job here; {jobs_run}, too: name one by `mpips {command} JOB`.)", err=True)


def _dump(folder: Path, into: Path, how: str, known: dict[str, Any]) -> None:
    """Write what is known about a job into the folder `into`. Raises UsageError if the files cannot be written.

    Args:
        folder: The folder of the job.
        into: The folder to write to.
        how: The format of the files, "json" or "pytorch".
        known: The result of `explain.as_json`.
    """
    pages = (folder / f"{rank['pid']}{folders.PAGE}" for rank in known["ranks"])
    # Ranks on other hosts have no page on this host. Only the dict `known` describes them.
    paths = [path for path in pages if path.exists()]
    try:
        if how == "pytorch":
            dump.write_for_pytorch([rank for path in paths if (rank := dump.read_rank(path)) is not None], into)
            # Only ranks of a store have roles.
            if any(rank.get("role") for rank in known["ranks"]):
                note = "torchfrtrace reads collectives, not calls of stores: `mpips why` says who waits in one"
                click.echo(f"note: {note}", err=True)
            return
        for path in paths:
            dump.write_rank(path, into)
        dump.write_json(into / WHY, known)
    except OSError as error:
        raise click.UsageError(f"--dump {into} cannot be written: {error.strerror or error}") from None


@command.command("top", cls=Interruptible)
@job_argument
@click.option("--once", is_flag=True, help="Show the table once, and exit.")
@json_option
@click.option("--every", type=Seconds(), default=1.0, show_default=True, help="Time between two tables.")
@within_option
def top(job: str | None, once: bool, with_json: bool, every: float, within: float) -> None:
    """Show the ranks of JOB: role, step, steps per second, share of time spent waiting, CPU, memory, last call.

    JOB is a name that this command shows, or a folder of pages. Default: the newest job. Ctrl-C ends the command.
    """
    folder, terminal = find(job), console()
    with JobWatch(folder, within) as watch:
        if once or with_json:
            ranks, unreached = _gather(watch, folder, every)
            explanation = explain(folder.name, ranks, read_end(folder), unreached)
            if with_json:
                click.echo(json.dumps(as_json(folder.name, explanation, ranks, unreached), indent=1))
            else:
                for table in _make_tables(folder.name, ranks, terminal.width):
                    show_table(table)
                click.echo(explanation.sentence)
            if job is None:
                _print_other_jobs(folder, "top")
            return
        shown = Live(console=terminal, screen=False, auto_refresh=False) if terminal.is_terminal else nullcontext()
        with shown as live:
            lives = True
            while lives:
                ranks, unreached = _gather(watch, folder, every)
                tables = _make_tables(folder.name, ranks, terminal.width)
                explanation = explain(folder.name, ranks, read_end(folder), unreached)
                if live is not None:
                    live.update(Group(*tables, Text(explanation.sentence)), refresh=True)
                else:
                    # The output is not a terminal, so print each table below the last one.
                    for table in tables:
                        show_table(table)
                    click.echo(f"{explanation.sentence}\n")
                lives = bool(unreached) or any(rank.lives for rank in ranks)


@command.command("page", cls=Interruptible)
@job_argument
@click.option(
    "--port",
    metavar="[HOST:]PORT",
    default="0",
    help="Port to serve at; 0: any free port. Without HOST: the loopback interface.",
)
def page(job: str | None, port: str) -> None:
    """Serve a live page of JOB for a browser, at an address with a token, until Ctrl-C.

    JOB is a name that `mpips top` shows. Default: the newest job. `mpips run --page PORT` serves the page of the job
    that it starts.
    """
    from mpips.launch.observe.live import serving

    with serving(port, find(job)) as address:
        click.echo(address)
        while True:
            time.sleep(3600)


@command.command("trace", cls=Interruptible)
@job_argument
@click.option("--seconds", type=Seconds(), default=5.0, show_default=True, help="Time to trace, from now.")
@click.option("-o", "--output", type=OutFile(), default="trace.json", show_default=True, help="File to write.")
def trace(job: str | None, seconds: float, output: Path) -> None:
    """Write a timeline of what all ranks of JOB do from now on, for Perfetto and chrome://tracing.

    JOB is the name that `mpips top` shows. Default: the newest job. `mpips run --trace` traces a whole job. If
    `mpips run` has started the job, the timeline includes ranks on other hosts.
    """
    # Imported late, because the other commands do not need the modules that `trace` imports.
    from mpips.launch.observe.trace import trace_running, write

    job_trace = trace_running(find(job), seconds)
    with writing(output):
        write(output, job_trace)


@command.command("metrics", cls=Interruptible)
@click.option("--dir", "folder", type=click.Path(exists=True, file_okay=False), help="Write mpips.prom to this folder.")
@click.option(
    "--port", metavar="[HOST:]PORT", help="Serve at http://HOST:PORT/metrics. Without HOST: the loopback interface."
)
@click.option("--every", type=Seconds(), default=15.0, show_default=True, help="Time between two writes of the file.")
@click.option("--once", is_flag=True, help="Write once, and exit; without --dir, to standard output.")
def metrics(folder: str | None, port: str | None, every: float, once: bool) -> None:
    """Export metrics of all your jobs on this host for Prometheus. Ctrl-C ends the command.

    Needs the extra `metrics`. `mpips run --metrics DIR` exports the metrics of one job.
    """
    exporter = _import_exporter()
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


def _import_exporter() -> Any:
    """Import the module of metrics. Raises UsageError if prometheus_client is not installed."""
    try:
        return importlib.import_module("mpips.launch.observe.metrics")
    except ModuleNotFoundError as error:
        raise click.UsageError(f"metrics need {error.name}: pip install 'mpips[metrics]'") from None


def _gather(watch: JobWatch, folder: Path, seconds: float) -> JobView:
    """Take samples of the ranks of a job. Raise UsageError if nothing is known about any rank."""
    view = watch.look(seconds)
    if not view.ranks and view.unreached:
        silent = (f"host {host} does not answer: {why}" for host, why in view.unreached.items())
        raise click.UsageError("; ".join(silent))
    if not view.ranks:
        raise click.UsageError(
            f"{folder} holds no page of a rank: it is not the folder of a job, or the job has ended well"
        )
    return view


# The columns of the table of ranks, the most useful columns first. If the terminal is too narrow, the last columns are
# left out.
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
# the columns of the table of ranks, in the order in which they are shown
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
# The columns of the second table, the most useful columns first. It shows the store's embedding tables.
TABLE_COLUMNS = (
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
    "removed",
    "refused",
    "counted",
    "no memory",
)
# columns that are left out if they are empty
RARE_COLUMNS = ("missed", "exchanges", "evicted", "removed", "refused", "counted", "no memory")
# columns that are aligned to the left
LEFT_COLUMNS = ("role", "host", "state", "where", "for", "table")
# The column "where" is cut to this width if it is wider.
WHERE_WIDTH = 30


def _make_tables(name: str, ranks: Sequence[Rank], width: int) -> list[Table]:
    """Return a table about a job's ranks and, if the job has embedding tables, a second table about them."""
    missed = missed_rounds(ranks)
    rows = [_make_row(rank, missed.get(rank.rank, 0.0)) for rank in ranks]
    tables = [
        row
        for table in dict.fromkeys(table for rank in ranks for table in rank.tables)
        for rank in ranks
        if table in rank.tables and rank.lives
        for row in [_make_table_row(table, rank)]
    ]
    first = _make_table(f"job {name}", rows, COLUMNS, ORDER, width)
    return [first, _make_table("tables", tables, TABLE_COLUMNS, TABLE_COLUMNS, width)] if tables else [first]


def _make_table_row(table: str, rank: Rank) -> dict[str, str]:
    """Return a row about one embedding table on one rank, as a dict: column -> text."""
    numbers, rates = rank.tables[table], rank.table_rates.get(table, {})
    row = dict.fromkeys(TABLE_COLUMNS, "") | {"table": table, "rank": str(rank.rank)}
    if rank.role == "server":
        return row | {
            "rows": f"{numbers['rows']:,}",
            "MB": f"{numbers['bytes'] / MEGA:.3g}",
            "rows/s": _format_rate(rates, "rows"),
            "room MB": f"{rank.room_bytes / MEGA:.0f}",
            **{
                field: f"{numbers[field]:,}" if numbers[field] else ""
                for field in ("evicted", "removed", "refused", "counted")
            },
        }
    pulled = numbers["in_place"] + numbers["asked"]
    return row | {
        "pushed/s": _format_rate(rates, "pushed"),
        "pulled/s": _format_rate(rates, "asked", "in_place"),
        "in place": f"{100 * numbers['in_place'] / pulled:.0f} %" if pulled else "",
        "no memory": f"{numbers['refused_pushes']:,}" if numbers["refused_pushes"] else "",
    }


def _format_rate(rates: Mapping[str, float], *fields: str) -> str:
    return f"{sum(rates[field] for field in fields):,.0f}" if rates else ""


def _make_table(
    title: str, rows: Sequence[Mapping[str, str]], columns: Sequence[str], order: Sequence[str], width: int
) -> Table:
    """Make a table that is at most `width` wide. At least three columns are shown, even if they do not fit.

    Args:
        title: The title of the table.
        rows: For each row, a dict: column -> text.
        columns: The columns, the most useful columns first. Columns at the end are dropped if they do not fit.
        order: The columns in the order in which they are shown.
        width: The width of the terminal.
    """
    widths = {column: max(len(column), *(len(row[column]) for row in rows)) for column in order}
    if "where" in widths:
        widths["where"] = min(widths["where"], WHERE_WIDTH)
    fitting = [column for column in columns if column not in RARE_COLUMNS or any(row[column] for row in rows)]
    while len(fitting) > 3 and sum(widths[column] + 3 for column in fitting) > width:
        fitting.pop()
    view = Table(title=title)
    shown = [column for column in order if column in fitting]
    for column in shown:
        view.add_column(
            column, justify="left" if column in LEFT_COLUMNS else "right", no_wrap=True, overflow="ellipsis"
        )
    for row in rows:
        state = row.get("state")
        style = "red" if state in ("gone", "stopped") else "yellow" if state == "waits" else ""
        view.add_row(*(row[column] for column in shown), style=style)
    return view


def _make_row(rank: Rank, missed: float) -> dict[str, str]:
    """Return a row about one rank, as a dict: column -> text.

    A quorum closes a round when enough workers have pushed. `missed` is the share of these rounds that closed without
    this rank.
    """
    state = "gone" if not rank.lives else "stopped" if rank.stopped else "waits" if rank.waits else "runs"
    stepped = rank.step >= 0
    rate = f"{rank.step_rate:.1f}" if rank.step_rate >= 0 else f"<{1 / max(rank.step_seconds, 1e-3):.1g}"
    exchanged = rank.exchanged_bytes / max(rank.exchanges, 1) / MEGA
    return {
        "missed": f"{100 * missed:.0f} %" if missed else "",
        "exchanges": f"{rank.exchanges}, {exchanged:.3g} MB, {rank.exchange_seconds:.0f} s ago" * (rank.exchanges > 0),
        "rank": str(rank.rank),
        "role": rank.role,
        "host": rank.host,
        "pid": str(rank.pid),
        "state": state,
        "step": str(rank.step) if stepped else "",
        "steps/s": rate if rank.lives and stepped else "",
        "step age": f"{rank.step_seconds:.0f} s" if stepped else "",
        "waits": f"{100 * rank.waiting:.0f} %" if rank.lives else "",
        "for": ",".join(map(str, rank.waits[0].late[:4])) if rank.waits else "",
        "CPU": f"{100 * rank.cpu:.0f} %" if rank.lives else "",
        "MB/s": f"{rank.byte_rate / MEGA:.3g}" if rank.lives and rank.byte_rate >= 0 else "",
        "queue": str(rank.queued) if rank.lives and rank.queued >= 0 else "",
        "MB": f"{rank.memory_bytes / MEGA:.0f}" if rank.lives else "",
        "where": rank.waits[0].what if rank.waits else str(rank.user_frame or rank.last_call),
    }


if __name__ == "__main__":
    command()
