"""Trace a job from outside: while it runs (`mpips run --trace`, `--summary`), or for some seconds (`mpips trace`).

Ranks write into files in the memory of their host (see `collectives.recorder.tracing`). At the end the files are read,
including those of ranks that were killed, and removed. On other hosts the job's agent starts this module as a program
(`main`). It is asked for its time again and again, and at the end for what the ranks there have written. Questions and
answers are lines, as in `launch.observe.hosts`:

    question            answer
    time                the name of the clock there, and its time in nanoseconds
    trace SECONDS       "" after that time, or the reason why no rank is traced
    read                for each process its identity and its compressed ring, which is then removed
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self, cast

import click

from mpips.collectives import files
from mpips.collectives.recorder import chrome, folders, ring, tracing
from mpips.collectives.recorder.tracing import RankTrace
from mpips.collectives.terminal import show_table, without_signals, write_json, writing
from mpips.launch.observe import clocks, summary
from mpips.launch.observe.clocks import Clock, Offset
from mpips.launch.observe.gather import catches
from mpips.launch.observe.hosts import Connection, connect, wait
from mpips.launch.observe.timeline import count_calls, merge

MODULE = "mpips.launch.observe.trace"
# time for another host to answer, and to send what its ranks have written
WITHIN_SECONDS = 10.0
READ_SECONDS = 120.0
# the time between two measurements of clocks
AGAIN_SECONDS = 30.0
# the time between two looks for the hosts of a job that begins, and for ranks that are alive
LOOK_SECONDS = 0.1
# zlib's fastest level
COMPRESSION = 1


class Traced(NamedTuple):
    """What the ranks of a job have recorded."""

    traces: list[RankTrace]
    # name -> clock, for each clock that is not this host's
    clocks: Mapping[str, Clock]
    # "host NAME" or "rank N" -> why it is missing
    left_out: Mapping[str, str]


class OtherHosts:
    """The other hosts of a job that is traced, with a connection to each. A context manager.

    Measures their clocks, and collects what ranks have recorded there and on this host.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # the number of the last question
        self._number = 0
        # host -> connection
        self._lines: dict[str, Connection[Any]] = {}
        # name of a clock -> its measurements
        self._offsets: dict[str, list[Offset]] = {}
        # host that did not answer at the last measurement -> why
        self._mute: dict[str, str] = {}
        # host that did not trace its ranks -> why
        self._refused: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        for line in self._lines.values():
            line.close()

    def find(self) -> bool:
        """Connect to hosts of the job that are new. True if the job has other hosts."""
        for name, line in connect(self._folder, MODULE, Any).items():
            self._lines.setdefault(name, line)
        return bool(self._lines)

    def measure(self) -> None:
        """Measure the clock of each host. Blocks for up to `WITHIN_SECONDS` if a host does not answer."""
        for name, line in self._lines.items():
            # Try twice, with a new connection, because the connection may have been cut since the last question.
            for _ in range(2):
                with suppress(ConnectionError):
                    self._measure(line)
                    self._mute.pop(name, None)
                    break
            else:
                self._mute[name] = line.failed

    def _measure(self, line: Connection[Any]) -> None:
        clock, _ = self._time_of(line)
        if clock != tracing.clock():
            self._offsets.setdefault(clock, []).append(clocks.measure(lambda: self._time_of(line)[1]))

    def _time_of(self, line: Connection[Any]) -> tuple[str, int]:
        self._ask([line], "time", WITHIN_SECONDS)
        if line.failed:
            raise ConnectionError(line.failed)
        name, now = cast(tuple[str, int], line.answer)
        return name, now

    def trace(self, seconds: float) -> str:
        """Let all ranks on all hosts record their calls for `seconds`. Blocks for that time.

        Returns "", or the reason why no rank on this host is traced.
        """
        self._number += 1
        for line in self._lines.values():
            line.ask(self._number, f"trace {seconds!r}")
        until = time.monotonic() + seconds + WITHIN_SECONDS
        why = trace_ranks(self._folder, seconds)
        if why:
            time.sleep(seconds if self._lines else 0.0)
        wait(self._lines.values(), until, WITHIN_SECONDS)
        for name, line in self._lines.items():
            if said := line.failed or str(line.answer):
                self._refused[name] = said
        return why

    def read(self, here: bool = True) -> Traced:
        """Read what ranks have recorded on other hosts and, with `here`, on this host, and remove it there.

        Hosts that did not answer, or did not trace, are not asked. They appear in `left_out`.
        """
        raw = list(tracing.read_raw(self._folder)) if here else []
        if here:
            tracing.forget(self._folder)
            folders.remove_if_empty(self._folder)
        missing = {**self._mute, **self._refused}
        asked = {name: line for name, line in self._lines.items() if name not in missing}
        self._ask(asked.values(), "read", READ_SECONDS)
        for name, line in asked.items():
            raw += ((who, unpack(text)) for who, text in line.answer or ())
            if line.failed:
                missing[name] = line.failed
        known = {name: Clock(offsets) for name, offsets in self._offsets.items()}
        found, left_out = [], {f"host {name}": why for name, why in missing.items()}
        for one in tracing.parse(raw):
            if one.who["clock"] in (*known, tracing.clock()):
                found.append(one)
            else:
                left_out[f"rank {one.rank}"] = f"the clock that it reads on {one.who.get('host', '')} is not known"
        return Traced(found, known, left_out)

    def _ask(self, lines: Iterable[Connection[Any]], words: str, within: float) -> None:
        self._number += 1
        lines = list(lines)
        for line in lines:
            line.ask(self._number, words)
        wait(lines, time.monotonic() + within, within)


@contextmanager
def tracing_job(
    folder: Path, several: bool, trace: Path | None, with_summary: bool, summary_json: Path | None
) -> Iterator[None]:
    """Context manager that traces a job, and writes the results when the job has ended, even by an exception.

    Args:
        folder: The folder of the job.
        several: The job has ranks on other hosts.
        trace: Write the timeline to this file.
        with_summary: Print the summary.
        summary_json: Write the summary to this file.
    """
    os.environ[tracing.VARIABLE] = str(tracing.RING_BYTES)
    ended = threading.Event()
    with OtherHosts(folder) as others:
        thread = threading.Thread(target=_measure_regularly, args=(others, ended), daemon=True)
        if several:
            with without_signals():
                thread.start()
        try:
            yield
        finally:
            del os.environ[tracing.VARIABLE]
            ended.set()
            if several:
                thread.join()
                others.measure()
            found = others.read()
            if trace:
                with writing(trace):
                    write(trace, found)
            if with_summary or summary_json:
                made = summary.summarize(found.traces)
                if with_summary:
                    for table in summary.tables(made):
                        show_table(table)
                    click.echo(_lost(found), nl=False)
                if summary_json:
                    write_json(summary_json, summary.as_json(made))


def _measure_regularly(others: OtherHosts, ended: threading.Event) -> None:
    while not others.find() and not ended.wait(LOOK_SECONDS):
        pass
    while not ended.is_set():
        others.measure()
        ended.wait(AGAIN_SECONDS)
        others.find()


def trace_running(folder: Path, seconds: float) -> Traced:
    """Trace a running job for `seconds` from now. Blocks for that time, and until the records are read.

    Raises ClickException if no rank could be traced.
    """
    with OtherHosts(folder) as others:
        others.find()
        others.measure()
        why = others.trace(seconds)
        others.measure()
        found = others.read(here=not why)
    if not found.traces:
        raise click.ClickException("; ".join([why, *(f"{one}: {other}" for one, other in found.left_out.items())]))
    return found


def write(path: Path, found: Traced) -> None:
    """Write the timeline of all ranks to a file, and print what is in it. Raises OSError if it cannot be written."""
    if not any(one.records for one in found.traces):
        click.echo("mpips: no rank has begun a call meanwhile; `mpips why` says where they are", err=True)
    events, about = merge(found.traces, found.clocks)
    about |= {"reference_clock": socket.gethostname(), "left_out": found.left_out}
    chrome.save(path, events, about)
    calls, ranks = sum(count_calls(one) for one in found.traces), len(found.traces)
    agreed = f", clocks agree to {about['clock_error_ns'] / 1e3:.0f} us" if found.clocks else ""
    click.echo(
        f"mpips: {path}: {calls} calls of {ranks} ranks, {about['flows']} arrows{agreed}; open it in "
        f"https://ui.perfetto.dev or chrome://tracing\n{_lost(found)}",
        err=True,
        nl=False,
    )


def _lost(found: Traced) -> str:
    """Return the lines about ranks and records that are missing, or ""."""
    said = [f"mpips: {one} is left out: {why}\n" for one, why in found.left_out.items()]
    lost = {one.rank: one.overwritten for one in found.traces if one.overwritten}
    if lost:
        ranks = ", ".join(f"{count} of rank {rank}" for rank, count in lost.items())
        room = tracing.RING_BYTES // ring.RECORD_BYTES
        said.append(
            f"mpips: the last calls alone are there: of {room} that a rank keeps at most, newer ones replaced {ranks}\n"
        )
    return "".join(said)


# ---- on each host: trace its ranks, and answer the launcher's host


def trace_ranks(folder: Path, seconds: float) -> str:
    """Let the ranks of a job on this host record their calls for `seconds`, or until they end. Blocks for that time.

    Returns "", or the reason why no rank is traced.
    """
    pids = [int(path.stem) for path in folder.glob(f"*{folders.PAGE}")]
    asked = [pid for pid in pids if folders.is_alive(pid) and _hears(pid)]
    if any(folder.glob(f"*{tracing.SUFFIX}")):
        return f"job {folder.name} is traced already: wait for the other `mpips trace`, or the job"
    if not asked:
        return f"no rank of job {folder.name} lives here that can be traced"
    request = folder / tracing.REQUEST
    until = time.monotonic_ns() + round(seconds * 1e9)
    files.write(request, json.dumps({"bytes": tracing.RING_BYTES, "until_ns": until}).encode())
    try:
        for pid in asked:
            with suppress(OSError):
                os.kill(pid, tracing.SIGNAL)
        while time.monotonic_ns() < until and any(map(folders.is_alive, asked)):
            time.sleep(min(LOOK_SECONDS, max(0.0, (until - time.monotonic_ns()) / 1e9)))
    except BaseException:
        tracing.forget(folder)
        raise
    finally:
        request.unlink(missing_ok=True)
    return ""


def _hears(pid: int) -> bool:
    with suppress(OSError):
        return catches(pid, tracing.SIGNAL)
    return False


def pack(data: bytes) -> str:
    """Compress a ring, and encode it as text for JSON."""
    return b64encode(zlib.compress(data, COMPRESSION)).decode()


def unpack(text: str) -> bytes:
    """Return the ring that `pack` was given."""
    return zlib.decompress(b64decode(text))


def main(job: str) -> None:
    """Answer questions about a job's traces on this host, a line each, until standard input ends."""
    folder = folders.jobs_folder() / job
    unread = False
    try:
        for line in sys.stdin:
            number, what, *words = line.split()
            answer: Any
            if what == "time":
                answer = tracing.clock(), time.monotonic_ns()
            elif not folders.is_ours(folder):
                answer = f"no rank of job {job} is here" if what == "trace" else []
            elif what == "trace":
                answer = trace_ranks(folder, float(words[0]))
                unread = not answer
            else:
                answer, unread = [(who, pack(data)) for who, data in tracing.read_raw(folder)], False
                tracing.forget(folder)
                folders.remove_if_empty(folder)
            sys.stdout.write(json.dumps([int(number), answer]) + "\n")
            sys.stdout.flush()
    finally:
        # The host that asked has gone, so nobody will read the records. They take memory.
        if unread:
            tracing.forget(folder)


if __name__ == "__main__":
    main(sys.argv[1])
