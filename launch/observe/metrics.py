"""Metrics of this user's jobs on this machine, for Prometheus: a file for node_exporter, or a port that serves them.

They are computed from the ranks' pages when Prometheus asks for them, so ranks do no work for them. Needs
prometheus_client (extra `metrics`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import click
from prometheus_client import CollectorRegistry, generate_latest, start_http_server, write_to_textfile
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mpips.collectives.recorder import folders
from mpips.collectives.terminal import parse_address, without_signals
from mpips.launch.observe.explain import is_replaced
from mpips.launch.observe.gather import Rank, gather, jobs

FILE = "mpips.prom"
# the time between two writes of the file, and between two looks for ranks that have come or gone
EVERY_SECONDS = 15.0
LOOK_SECONDS = 0.5
LABELS = ("job", "rank")


class Definition(NamedTuple):
    """One metric of a rank."""

    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    # its help
    text: str
    # Returns the value for a rank, or None if the rank has none. With a `label`: label value -> value.
    value: Callable[[Rank], float | Mapping[str, float] | None]
    # a further label: "table", or "worker" for workers that come late; "" for none
    label: str = ""


GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


def _of_tables(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, role: str, words: Sequence[str]
) -> Definition:
    """Define a metric of embedding tables on ranks of a role: the sum of the numbers `words` of `page.TABLE`."""

    def values(one: Rank) -> Mapping[str, float]:
        tables = one.tables if one.role == role and (one.lives or kind is COUNTER) else {}
        return {table: float(sum(numbers[word] for word in words)) for table, numbers in tables.items()}

    return Definition(kind, f"mpips_table_{name}", text, values, "table")


DEFINITIONS = (
    Definition(
        GAUGE,
        "mpips_rank_up",
        "1 while the rank's process is there; none where the job goes on without it.",
        lambda one: float(one.lives),
    ),
    Definition(GAUGE, "mpips_rank_stopped", "1 while a signal has stopped it.", lambda one: float(one.stopped)),
    Definition(GAUGE, "mpips_start_time_seconds", "When the rank began, in Unix time.", lambda one: one.began),
    Definition(
        GAUGE,
        "mpips_generation",
        "The generation of its store.",
        lambda one: float(one.generation) if one.generation >= 0 else None,
    ),
    Definition(
        GAUGE,
        "mpips_step",
        "The training step that it has made last.",
        lambda one: float(one.step) if one.step >= 0 else None,
    ),
    Definition(
        GAUGE,
        "mpips_step_age_seconds",
        "Seconds since then.",
        lambda one: one.step_seconds if one.step >= 0 and one.lives else None,
    ),
    Definition(
        GAUGE,
        "mpips_waiting_seconds",
        "How long it has waited in the wait that it is in; 0: in none.",
        lambda one: max((wait.seconds for wait in one.waits), default=0.0) if one.lives else None,
    ),
    Definition(
        COUNTER,
        "mpips_waited_seconds",
        "Seconds that it has waited in waits that are over.",
        lambda one: one.waited_seconds,
    ),
    Definition(COUNTER, "mpips_waits", "Waits that are over.", lambda one: float(one.wait_count)),
    Definition(COUNTER, "mpips_calls", "Collectives on one host.", lambda one: float(one.calls)),
    Definition(
        COUNTER,
        "mpips_taken_bytes",
        "Bytes that workers have pushed to it, a server.",
        lambda one: float(one.taken_bytes) if one.queued >= 0 else None,
    ),
    Definition(
        GAUGE,
        "mpips_queued",
        "Pushes and pulls that wait at it, a server.",
        lambda one: float(one.queued) if one.queued >= 0 and one.lives else None,
    ),
    Definition(
        GAUGE,
        "mpips_table_room_bytes",
        "Memory for new rows at it, a server, before it refuses a push.",
        lambda one: float(one.room_bytes) if one.room_bytes >= 0 and one.lives else None,
    ),
    _of_tables(GAUGE, "rows", "Rows of the table that it has, a server.", "server", ["rows"]),
    _of_tables(GAUGE, "bytes", "Bytes of these rows with state, index and counts.", "server", ["bytes"]),
    _of_tables(GAUGE, "counted_ids", "Ids without a row whose updates it counts.", "server", ["counted"]),
    _of_tables(COUNTER, "updates", "Updates of the table.", "server", ["updates"]),
    _of_tables(COUNTER, "evicted_rows", "Rows that it has dropped.", "server", ["evicted"]),
    _of_tables(COUNTER, "refused_gradients", "Gradients of ids that got no row.", "server", ["refused"]),
    _of_tables(COUNTER, "pushed_rows", "Rows whose gradients it has pushed, a worker.", "worker", ["pushed"]),
    _of_tables(COUNTER, "pulled_rows", "Rows that it has pulled, a worker.", "worker", ["asked", "in_place"]),
    _of_tables(COUNTER, "in_place_rows", "Of these, read in the servers' memory.", "worker", ["in_place"]),
    _of_tables(COUNTER, "refused_pushes", "Pushes for which a server had no memory.", "worker", ["refused_pushes"]),
    Definition(
        COUNTER,
        "mpips_quorum_rounds",
        "Rounds of keys that a quorum has closed at it, a server.",
        lambda one: float(one.quorum_rounds) if one.quorum_rounds >= 0 else None,
    ),
    Definition(
        COUNTER,
        "mpips_quorum_missed_rounds",
        "Of these, closed without the worker, or with what came late.",
        lambda one: one.missed,
        "worker",
    ),
    Definition(
        COUNTER,
        "mpips_exchanges",
        "Exchanges of parameters, between which it trains by itself.",
        lambda one: float(one.exchanges) if one.exchanges else None,
    ),
    Definition(
        COUNTER,
        "mpips_exchanged_bytes",
        "Bytes of these exchanges, up and down.",
        lambda one: float(one.exchanged_bytes) if one.exchanges else None,
    ),
    Definition(
        GAUGE,
        "mpips_exchange_age_seconds",
        "Seconds since the last one was over.",
        lambda one: one.exchange_seconds if one.exchanges and one.lives else None,
    ),
    Definition(
        COUNTER,
        "mpips_failures",
        "Generations and communicators that have ended by an error.",
        lambda one: float(one.failures),
    ),
    Definition(COUNTER, "mpips_checkpoints", "Checkpoints that it has written.", lambda one: float(one.checkpoints)),
    Definition(
        COUNTER,
        "mpips_cpu_seconds",
        "Processor seconds, of user and kernel.",
        lambda one: one.cpu_seconds if one.lives else None,
    ),
    Definition(
        GAUGE,
        "mpips_resident_memory_bytes",
        "Memory of the process.",
        lambda one: float(one.memory_bytes) if one.lives else None,
    ),
)


class Jobs(Collector):
    """The metrics of all jobs of this user on this host, or of one job. Reads the pages at each `collect`."""

    def __init__(self, job: str | None = None) -> None:
        self._job = job

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. prometheus_client calls this for each request."""
        ranks = [
            (path.name, one, is_replaced(one, members))
            for path in jobs()
            if self._job in (None, path.name)
            for members in [gather(path, seconds=0.0, stacks=False)]
            for one in members
        ]
        labels = (*LABELS, "role", "host", "program")
        info = GAUGE("mpips_rank_info", "A rank, its role, host and program.", labels=labels)
        for job, one, _ in ranks:
            info.add_metric([job, str(one.rank), one.role, one.host, " ".join(one.program[:1])], 1)
        yield info
        for definition in DEFINITIONS:
            family = definition.kind(definition.name, definition.text, labels=(*LABELS, *definition.label.split()))
            for job, one, replaced in ranks:
                value = definition.value(one)
                if isinstance(value, Mapping):
                    for label, number in value.items():
                        family.add_metric([job, str(one.rank), label], number)
                elif value is not None and not (replaced and definition.name == "mpips_rank_up"):
                    family.add_metric([job, str(one.rank)], value)
            yield family


def write(folder: Path, job: str | None = None) -> Path:
    """Write all metrics to a file in node_exporter's folder, atomically. Raises OSError if that fails.

    `job`: write only the metrics of this job, to a file of its own. Returns the path of the file.
    """
    path = folder / (FILE if job is None else f"mpips-{job}.prom")
    write_to_textfile(str(path), _registry(job))
    return path


@contextmanager
def serving(host: str, port: int, job: str | None = None) -> Iterator[int]:
    """Context manager that serves all metrics, or those of one job, at http://host:port/metrics. Yields the port.

    Raises OSError if the port is taken.
    """
    with without_signals():
        server, thread = start_http_server(port, addr=host, registry=_registry(job))
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def text() -> str:
    """Return all metrics in the text format of Prometheus."""
    return generate_latest(_registry(None)).decode()


@contextmanager
def exporting(folder: str | None, address: str | None, job: str) -> Iterator[None]:
    """Context manager that exports the metrics of a job.

    Args:
        folder: Write them to a file in this folder of node_exporter.
        address: Serve them at this "[HOST:]PORT".
        job: The name of the job.

    Raises:
        UsageError: The folder does not exist, or the file or the port cannot be used.
    """
    if folder is not None and not Path(folder).is_dir():
        raise click.UsageError(f"--metrics {folder!r} is no folder: name the one that node_exporter reads, or make it")
    with ExitStack() as stack:
        try:
            if address is not None:
                stack.enter_context(serving(*parse_address(address), job))
            if folder is not None:
                stack.enter_context(_writing(Path(folder), job))
        except OSError as error:
            where = folder if address is None else f"{address} or {folder}" if folder else address
            raise click.UsageError(f"metrics cannot go to {where}: {error.strerror}") from None
        yield


@contextmanager
def _writing(folder: Path, job: str) -> Iterator[None]:
    """Context manager that writes the metrics of a job regularly, in a thread. Removes the file at the end."""
    ended, written = threading.Event(), write(folder, job)
    thread = threading.Thread(target=_write_regularly, args=(folder, job, ended), daemon=True)
    try:
        with without_signals():
            thread.start()
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            written.unlink()


def _write_regularly(folder: Path, job: str, ended: threading.Event) -> None:
    """Write every `EVERY_SECONDS`, and at once when ranks have come or gone.

    Without the latter, a job that is shorter than `EVERY_SECONDS` would have no metrics.
    """
    known, due = 0, time.monotonic() + EVERY_SECONDS
    while not ended.wait(LOOK_SECONDS):
        there = len(list((folders.jobs_folder() / job).glob(f"*{folders.PAGE}")))
        if there != known or time.monotonic() >= due:
            known, due = there, time.monotonic() + EVERY_SECONDS
            # The disk may be full. Other programs will report that.
            with suppress(OSError):
                write(folder, job)


def _registry(job: str | None) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(Jobs(job))
    return registry


def names() -> Sequence[str]:
    """Return the names of all metrics as Prometheus shows them: counters end in "_total"."""
    return ["mpips_rank_info", *(one.name + "_total" * (one.kind is COUNTER) for one in DEFINITIONS)]
