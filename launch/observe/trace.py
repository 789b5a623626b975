"""Trace a job from outside: from start to end (`mpips run --trace`, `--summary`), or for some seconds (`mpips trace`).

Ranks write records of their calls into files in the memory of their host (see `collectives.recorder.tracing`). At the
end these files are read and removed. This includes the files of ranks that were killed. On each other host, ssh or its
replacement (the agent, see `launch.observe.hosts`) runs this module as a program. This host asks the program for its
time again and again, and at the end for the records of the ranks there. Questions and answers are lines:

    question            answer
    time                the name of the host's clock, and its time in nanoseconds
    trace SECONDS       "" when SECONDS have passed, or the reason why no rank is traced
    read                for each process its identity and its compressed records; the files are then removed
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
from mpips.launch.observe.clocks import HostClock, Offset
from mpips.launch.observe.gather import catches
from mpips.launch.observe.hosts import HostConnection, connect, wait
from mpips.launch.observe.timeline import count_calls, merge

MODULE = "mpips.launch.observe.trace"
# seconds that another host has to answer
WITHIN_SECONDS = 10.0
# seconds that another host has to send the records of its ranks
READ_SECONDS = 120.0
# seconds between two measurements of clocks
MEASURE_SECONDS = 30.0
# seconds between two checks whether the hosts of a starting job are known, or whether traced ranks are alive
LOOK_SECONDS = 0.1
# zlib's fastest level
COMPRESSION = 1


class JobTrace(NamedTuple):
    """The records of the ranks of a job."""

    # the records of each process
    traces: list[RankTrace]
    # the clocks of other hosts: name -> clock
    clocks: Mapping[str, HostClock]
    # "host NAME" or "rank N" -> why the records of this host or rank are missing
    left_out: Mapping[str, str]


class OtherHosts:
    """The other hosts of a job that is traced. A context manager that keeps a connection to each of these hosts.

    Measures the clocks of the hosts, and collects the records of all ranks, including those on this host.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # the number of the last question
        self._question = 0
        # host -> the connection to this host
        self._connections: dict[str, HostConnection[Any]] = {}
        # name of a clock -> the measurements of this clock
        self._offsets: dict[str, list[Offset]] = {}
        # the hosts that did not answer at the last measurement: host -> why
        self._silent: dict[str, str] = {}
        # the hosts that did not trace their ranks: host -> why
        self._refused: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        for connection in self._connections.values():
            connection.close()

    def find(self) -> bool:
        """Look for hosts of the job that are not known yet. Return True if any other host of the job is known."""
        for name, connection in connect(self._folder, MODULE, Any).items():
            self._connections.setdefault(name, connection)
        return bool(self._connections)

    def measure(self) -> None:
        """Measure the clock of each host. If a host does not answer, blocks for up to `WITHIN_SECONDS` for each try."""
        for name, connection in self._connections.items():
            # Try twice. The second try makes a new connection, because the old connection may have broken since the
            # last question.
            for _ in range(2):
                with suppress(ConnectionError):
                    self._measure(connection)
                    self._silent.pop(name, None)
                    break
            else:
                self._silent[name] = connection.failed

    def _measure(self, connection: HostConnection[Any]) -> None:
        clock, _ = self._time_of(connection)
        if clock != tracing.clock():
            self._offsets.setdefault(clock, []).append(clocks.measure(lambda: self._time_of(connection)[1]))

    def _time_of(self, connection: HostConnection[Any]) -> tuple[str, int]:
        self._ask([connection], "time", WITHIN_SECONDS)
        if connection.failed:
            raise ConnectionError(connection.failed)
        name, now = cast(tuple[str, int], connection.answer)
        return name, now

    def trace(self, seconds: float) -> str:
        """Make all ranks on all hosts record their calls for `seconds`. Blocks for this time.

        Returns "" if ranks on this host were traced, and otherwise the reason why not.
        """
        self._question += 1
        for connection in self._connections.values():
            connection.ask(self._question, f"trace {seconds!r}")
        until = time.monotonic() + seconds + WITHIN_SECONDS
        why = trace_ranks(self._folder, seconds)
        if why:
            time.sleep(seconds if self._connections else 0.0)
        wait(self._connections.values(), until, WITHIN_SECONDS)
        for name, connection in self._connections.items():
            if reason := connection.failed or str(connection.answer):
                self._refused[name] = reason
        return why

    def read(self, this_host: bool = True) -> JobTrace:
        """Read and remove the records of ranks on other hosts and, if `this_host` is True, on this host.

        Hosts that did not answer earlier, or that did not trace their ranks, are not asked again. The field `left_out`
        of the result lists these hosts.
        """
        raw = list(tracing.read_raw(self._folder)) if this_host else []
        if this_host:
            tracing.forget(self._folder)
            folders.remove_if_empty(self._folder)
        missing = {**self._silent, **self._refused}
        usable = {name: connection for name, connection in self._connections.items() if name not in missing}
        self._ask(usable.values(), "read", READ_SECONDS)
        for name, connection in usable.items():
            raw += ((who, unpack(text)) for who, text in connection.answer or ())
            if connection.failed:
                missing[name] = connection.failed
        known_clocks = {name: HostClock(offsets) for name, offsets in self._offsets.items()}
        traces = []
        left_out = {f"host {name}": why for name, why in missing.items()}
        for trace in tracing.parse(raw):
            if trace.who["clock"] in (*known_clocks, tracing.clock()):
                traces.append(trace)
            else:
                left_out[f"rank {trace.rank}"] = f"the clock that it reads on {trace.who.get('host', '')} is not known"
        return JobTrace(traces, known_clocks, left_out)

    def _ask(self, connections: Iterable[HostConnection[Any]], question: str, within: float) -> None:
        self._question += 1
        connections = list(connections)
        for connection in connections:
            connection.ask(self._question, question)
        wait(connections, time.monotonic() + within, within)


@contextmanager
def tracing_job(
    folder: Path, several: bool, trace: Path | None, with_summary: bool, summary_json: Path | None
) -> Iterator[None]:
    """Context manager that traces the job in its block. Writes the results at the end, even after an exception.

    Args:
        folder: The folder of the job.
        several: True if some ranks of the job are on other hosts.
        trace: Write the timeline to this file.
        with_summary: True to print the summary.
        summary_json: Write the summary to this file as JSON.
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
            job_trace = others.read()
            if trace:
                with writing(trace):
                    write(trace, job_trace)
            if with_summary or summary_json:
                job_summary = summary.summarize(job_trace.traces)
                if with_summary:
                    for table in summary.tables(job_summary):
                        show_table(table)
                    click.echo(_describe_missing(job_trace), nl=False)
                if summary_json:
                    write_json(summary_json, summary.as_json(job_summary))


def _measure_regularly(others: OtherHosts, ended: threading.Event) -> None:
    while not others.find() and not ended.wait(LOOK_SECONDS):
        pass
    while not ended.is_set():
        others.measure()
        ended.wait(MEASURE_SECONDS)
        others.find()


def trace_running(folder: Path, seconds: float) -> JobTrace:
    """Trace a running job for `seconds` from now. Blocks for this time, and then until the records are read.

    Raises ClickException if no rank could be traced.
    """
    with OtherHosts(folder) as others:
        others.find()
        others.measure()
        why = others.trace(seconds)
        others.measure()
        job_trace = others.read(this_host=not why)
    if not job_trace.traces:
        reasons = (f"{name}: {reason}" for name, reason in job_trace.left_out.items())
        raise click.ClickException("; ".join([why, *reasons]))
    return job_trace


def write(path: Path, job_trace: JobTrace) -> None:
    """Write the timeline of all ranks to a file, and print a line about what it contains.

    Raises OSError if the file cannot be written.
    """
    if not any(trace.records for trace in job_trace.traces):
        click.echo("mpips: no rank has begun a call during the trace; `mpips why` says where the ranks are", err=True)
    events, about = merge(job_trace.traces, job_trace.clocks)
    about |= {"reference_clock": socket.gethostname(), "left_out": job_trace.left_out}
    chrome.save(path, events, about)
    calls, ranks = sum(map(count_calls, job_trace.traces)), len(job_trace.traces)
    agreement = f", clocks agree to {about['clock_error_ns'] / 1e3:.0f} us" if job_trace.clocks else ""
    click.echo(
        f"mpips: {path}: {calls} calls of {ranks} ranks, {about['flows']} arrows{agreement}; open it in "
        f"https://ui.perfetto.dev or chrome://tracing\n{_describe_missing(job_trace)}",
        err=True,
        nl=False,
    )


def _describe_missing(job_trace: JobTrace) -> str:
    """Return lines about the ranks and records that are missing from a trace, or "" if none are missing."""
    lines = [f"mpips: {name} is left out: {why}\n" for name, why in job_trace.left_out.items()]
    lost = {trace.rank: trace.overwritten for trace in job_trace.traces if trace.overwritten}
    if lost:
        ranks = ", ".join(f"{count} of rank {rank}" for rank, count in lost.items())
        room = tracing.RING_BYTES // ring.RECORD_BYTES
        lines.append(f"mpips: a rank keeps its last {room} calls; these earlier calls are missing: {ranks}\n")
    return "".join(lines)


# ---- on each host: trace the host's ranks, and answer questions from the host of the launcher


def trace_ranks(folder: Path, seconds: float) -> str:
    """Make the ranks of a job on this host record their calls for `seconds`. Blocks until this time is over.

    Returns earlier if all traced ranks have ended. Returns "" or, if no rank can be traced, the reason.
    """
    pids = [int(path.stem) for path in folder.glob(f"*{folders.PAGE}")]
    traceable = [pid for pid in pids if folders.is_alive(pid) and _can_be_traced(pid)]
    if any(folder.glob(f"*{tracing.SUFFIX}")):
        return f"job {folder.name} is traced already: wait for the other `mpips trace`, or the job"
    if not traceable:
        return f"no rank of job {folder.name} lives here that can be traced"
    request = folder / tracing.REQUEST
    until = time.monotonic_ns() + round(seconds * 1e9)
    files.write(request, json.dumps({"bytes": tracing.RING_BYTES, "until_ns": until}).encode())
    try:
        for pid in traceable:
            with suppress(OSError):
                os.kill(pid, tracing.SIGNAL)
        while time.monotonic_ns() < until and any(map(folders.is_alive, traceable)):
            time.sleep(min(LOOK_SECONDS, max(0.0, (until - time.monotonic_ns()) / 1e9)))
    except BaseException:
        tracing.forget(folder)
        raise
    finally:
        request.unlink(missing_ok=True)
    return ""


def _can_be_traced(pid: int) -> bool:
    with suppress(OSError):
        return catches(pid, tracing.SIGNAL)
    return False


def pack(data: bytes) -> str:
    """Compress the bytes of a record file, and encode them as text for JSON."""
    return b64encode(zlib.compress(data, COMPRESSION)).decode()


def unpack(text: str) -> bytes:
    """Return the bytes that `pack` has compressed and encoded."""
    return zlib.decompress(b64decode(text))


def main(job: str) -> None:
    """Answer questions about a job's records on this host. Each line of standard input is a question.

    Ends when standard input ends.
    """
    folder = folders.jobs_folder() / job
    unread = False
    try:
        for line in sys.stdin:
            number, what, *arguments = line.split()
            answer: Any
            if what == "time":
                answer = tracing.clock(), time.monotonic_ns()
            elif not folders.is_ours(folder):
                answer = f"no rank of job {job} is here" if what == "trace" else []
            elif what == "trace":
                answer = trace_ranks(folder, float(arguments[0]))
                unread = not answer
            else:
                answer, unread = [(who, pack(data)) for who, data in tracing.read_raw(folder)], False
                tracing.forget(folder)
                folders.remove_if_empty(folder)
            sys.stdout.write(json.dumps([int(number), answer]) + "\n")
            sys.stdout.flush()
    finally:
        # The host that asked has closed the connection, so nobody will read the records. Free the memory that they use.
        if unread:
            tracing.forget(folder)


if __name__ == "__main__":
    main(sys.argv[1])
