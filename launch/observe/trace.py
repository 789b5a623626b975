"""Trace a job from outside: as long as it runs (`mpips run --trace`, `--summary`), or for some seconds (`mpips trace`).

Ranks write into files in the memory of their host (`collectives.recorder.tracing`). They are read when the time is
over, also those of ranks that were killed, and removed. Other hosts are asked by the job's agent: for their time, again
and again, and at the end for what their ranks have written. The agent starts this module there as a program (`main`),
which answers lines, as `launch.observe.hosts` says:

    time                the name of the clock that is read there, and its time in nanoseconds
    trace SECONDS       "" when the time is over, or why no rank is traced
    read                of each process who it is, and its ring, compressed; they are removed there
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
WITHIN_SECONDS, READ_SECONDS = 10.0, 120.0
"""For another host to answer; and with what its ranks have written."""
AGAIN_SECONDS = 30.0
"""Between two measurements of clocks."""
LOOK_SECONDS = 0.1
"""Between two looks for the hosts of a job that begins, and whether ranks live."""
COMPRESSION = 1
"""zlib's level: quick."""


class Traced(NamedTuple):
    """Hold what the ranks of a job have recorded. `clocks`: by name, those that are not this host's. `left_out`: by
    host or rank, why it is not there."""

    traces: list[RankTrace]
    clocks: Mapping[str, Clock]
    left_out: Mapping[str, str]


class OtherHosts:
    """The other hosts of a job that is traced, by a connection to each: what their clocks show, what is there."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._lines: dict[str, Connection[Any]] = {}
        self._offsets: dict[str, list[Offset]] = {}
        self._mute: dict[str, str] = {}
        self._refused: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: type[BaseException] | BaseException | TracebackType | None) -> None:
        for line in self._lines.values():
            line.close()

    def find(self) -> bool:
        """Look which hosts the job is on by now; return whether there are others."""
        for name, line in connect(self._folder, MODULE, Any).items():
            self._lines.setdefault(name, line)
        return bool(self._lines)

    def measure(self) -> None:
        """Measure the clock of each of them. Blocking, for `WITHIN_SECONDS` at most for a host that is mute."""
        for name, line in self._lines.items():
            for _ in range(2):  # a connection may have been cut meanwhile
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
        """Have all ranks traced for so many seconds, here, too. Blocking; return why none is here."""
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
        """Read what ranks have recorded, and remove it: there, and `here`. Hosts that are left out are not asked."""
        raw = list(tracing.read_raw(self._folder)) if here else []
        if here:
            tracing.forget(self._folder)
            folders.leave(self._folder)
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
    """Trace the job that the block runs, and write what is asked for when it has ended, however.

    `several`: it has ranks on other hosts.
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
    """Return what the ranks of a running job do in so many seconds from now. Blocking; ClickException for nothing."""
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
    """Write one timeline of all, and say what is in it. OSError as of files."""
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
    """Return what to say of ranks and records that are not there; "" for none."""
    said = [f"mpips: {one} is left out: {why}\n" for one, why in found.left_out.items()]
    lost = {one.rank: one.overwritten for one in found.traces if one.overwritten}
    if lost:
        ranks = ", ".join(f"{count} of rank {rank}" for rank, count in lost.items())
        room = tracing.RING_BYTES // ring.RECORD_BYTES
        said.append(
            f"mpips: the last calls alone are there: of {room} that a rank keeps at most, newer ones replaced {ranks}\n"
        )
    return "".join(said)


# ---- on a host: its ranks, and answers to the host of the launcher


def trace_ranks(folder: Path, seconds: float) -> str:
    """Have the ranks of a job on this host trace themselves for so many seconds, or to their end. Blocking.

    Return "", or why not.
    """
    pids = [int(path.stem) for path in folder.glob(f"*{folders.PAGE}")]
    asked = [pid for pid in pids if folders.lives(pid) and _hears(pid)]
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
        while time.monotonic_ns() < until and any(map(folders.lives, asked)):
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
    """Return a ring as text."""
    return b64encode(zlib.compress(data, COMPRESSION)).decode()


def unpack(text: str) -> bytes:
    """Return the ring that `pack` was given."""
    return zlib.decompress(b64decode(text))


def main(job: str) -> None:
    """Answer questions about a job's traces on this host, a line each, until there are no more."""
    folder = folders.of_jobs() / job
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
                folders.leave(folder)
            sys.stdout.write(json.dumps([int(number), answer]) + "\n")
            sys.stdout.flush()
    finally:
        if unread:  # who has asked is gone
            tracing.forget(folder)


if __name__ == "__main__":
    main(sys.argv[1])
