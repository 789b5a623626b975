"""Trace a job from outside: as long as it runs (`mpips run --trace`, `--summary`), or for some seconds (`mpips trace`).

Ranks write into files in the memory of their host (`collectives.recorder.tracing`). They are read when the time is
over, also those of ranks that were killed, and removed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import click

from collectives import files
from collectives.recorder import chrome, own, ring, tracing
from collectives.recorder.tracing import RankTrace
from collectives.terminal import show_table, write_json, writing
from launch.observe import summary
from launch.observe.gather import catches
from launch.observe.timeline import merge


@contextmanager
def tracing_job(folder: Path, trace: Path | None, with_summary: bool, summary_json: Path | None) -> Iterator[None]:
    """Trace the job that the block runs, and write what is asked for when it has ended, however."""
    os.environ[tracing.VARIABLE] = str(tracing.RING_BYTES)
    try:
        yield
    finally:
        del os.environ[tracing.VARIABLE]
        found = tracing.read_traces(folder)
        tracing.forget(folder)
        with suppress(OSError):
            folder.rmdir()  # where all ranks have ended well
        if trace:
            with writing(trace):
                write(trace, found)
        if with_summary or summary_json:
            made = summary.summarize(found)
            if with_summary:
                for table in summary.tables(made):
                    show_table(table)
                click.echo(_left_out(found), nl=False)
            if summary_json:
                write_json(summary_json, summary.as_json(made))


def trace_running(folder: Path, seconds: float) -> list[RankTrace]:
    """Return what the ranks of a running job do in so many seconds from now. Blocking; ClickException for nothing."""
    pids = [int(path.stem) for path in folder.glob(f"*{own.PAGE}")]
    asked = [pid for pid in pids if own.lives(pid) and _hears(pid)]
    if any(folder.glob(f"*{tracing.SUFFIX}")):
        raise click.ClickException(f"job {folder.name} is traced already: wait for the other `mpips trace`, or the job")
    if not asked:
        raise click.ClickException(f"no rank of job {folder.name} lives here that can be traced")
    until = time.monotonic_ns() + round(seconds * 1e9)
    request = folder / tracing.REQUEST
    files.write(request, json.dumps({"bytes": tracing.RING_BYTES, "until_ns": until}).encode())
    try:
        for pid in asked:
            with suppress(OSError):
                os.kill(pid, tracing.SIGNAL)
        time.sleep(seconds)
        return tracing.read_traces(folder)
    finally:
        request.unlink()
        tracing.forget(folder)


def _hears(pid: int) -> bool:
    with suppress(OSError):
        return catches(pid, tracing.SIGNAL)
    return False


def write(path: Path, found: Sequence[RankTrace]) -> None:
    """Write one timeline of all, and say what is in it. OSError as of files."""
    events, about = merge(found, {})
    chrome.save(path, events, about)
    records = sum(len(one.records) for one in found)
    click.echo(f"mpips: {path}: {records} calls of {len(found)} ranks, {about.get('flows', 0)} arrows; open it in "
               f"https://ui.perfetto.dev or chrome://tracing\n{_left_out(found)}", err=True, nl=False)  # fmt: skip


def _left_out(found: Sequence[RankTrace]) -> str:
    """Return what to say of records that are lost; "" for none."""
    lost = {one.rank: one.overwritten for one in found if one.overwritten}
    if not lost:
        return ""
    ranks = ", ".join(f"{count} of rank {rank}" for rank, count in lost.items())
    room = tracing.RING_BYTES // ring.RECORD_BYTES
    return f"mpips: the last calls alone are there: of {room} that a rank keeps at most, newer ones replaced {ranks}\n"
