"""Export metrics of this user's jobs on this machine for Prometheus: in a file for node_exporter, or at a port.

The metrics are computed, whenever Prometheus asks for them, from the ranks' pages: files in memory in which the ranks
write what they do. So the ranks do no work for metrics. Needs prometheus_client (extra `metrics`).
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
# seconds between two writes of the file
EVERY_SECONDS = 15.0
# seconds between two checks whether ranks have begun or ended
LOOK_SECONDS = 0.5
LABELS = ("job", "rank")


class RankMetric(NamedTuple):
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    # the help text
    text: str
    # Returns the value for a rank, or None if the rank has no value. If the metric has a `label`, returns a dict from
    # each value of the label to the metric's value.
    value: Callable[[Rank], float | Mapping[str, float] | None]
    # the name of a third label in addition to "job" and "rank": "table", "worker", or "" for none
    label: str = ""


GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily


def _of_tables(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, text: str, role: str, fields: Sequence[str]
) -> RankMetric:
    """Define a metric of embedding tables. Only ranks with the role `role` have it.

    The value for a table is the sum of the table's numbers `fields`, which are names from `page.TABLE`.
    """

    def values(rank: Rank) -> Mapping[str, float]:
        tables = rank.tables if rank.role == role and (rank.lives or kind is COUNTER) else {}
        return {table: float(sum(numbers[field] for field in fields)) for table, numbers in tables.items()}

    return RankMetric(kind, f"mpips_table_{name}", text, values, "table")


DEFINITIONS = (
    RankMetric(
        GAUGE,
        "mpips_rank_up",
        "1 while the rank's process runs. Missing if the job goes on without the rank.",
        lambda rank: float(rank.lives),
    ),
    RankMetric(GAUGE, "mpips_rank_stopped", "1 while a signal has stopped the rank.", lambda rank: float(rank.stopped)),
    RankMetric(GAUGE, "mpips_start_time_seconds", "When the rank began, in Unix time.", lambda rank: rank.began),
    RankMetric(
        GAUGE,
        "mpips_generation",
        "The generation of the rank's store.",
        lambda rank: float(rank.generation) if rank.generation >= 0 else None,
    ),
    RankMetric(
        GAUGE,
        "mpips_step",
        "The last training step that has ended.",
        lambda rank: float(rank.step) if rank.step >= 0 else None,
    ),
    RankMetric(
        GAUGE,
        "mpips_step_age_seconds",
        "Seconds since the last training step ended.",
        lambda rank: rank.step_seconds if rank.step >= 0 and rank.lives else None,
    ),
    RankMetric(
        GAUGE,
        "mpips_waiting_seconds",
        "Seconds that the rank has been waiting; 0 if it does not wait.",
        lambda rank: max((wait.seconds for wait in rank.waits), default=0.0) if rank.lives else None,
    ),
    RankMetric(
        COUNTER,
        "mpips_waited_seconds",
        "Seconds in waits that have ended.",
        lambda rank: rank.waited_seconds,
    ),
    RankMetric(COUNTER, "mpips_waits", "Waits that have ended.", lambda rank: float(rank.wait_count)),
    RankMetric(COUNTER, "mpips_calls", "Collectives on one host.", lambda rank: float(rank.calls)),
    RankMetric(
        COUNTER,
        "mpips_taken_bytes",
        "Bytes that workers have pushed to this server.",
        lambda rank: float(rank.taken_bytes) if rank.queued >= 0 else None,
    ),
    RankMetric(
        GAUGE,
        "mpips_queued",
        "Pushes and pulls that wait at this server.",
        lambda rank: float(rank.queued) if rank.queued >= 0 and rank.lives else None,
    ),
    RankMetric(
        GAUGE,
        "mpips_table_room_bytes",
        "Bytes that this server has left for new rows.",
        lambda rank: float(rank.room_bytes) if rank.room_bytes >= 0 and rank.lives else None,
    ),
    _of_tables(GAUGE, "rows", "Rows of the table on this server.", "server", ["rows"]),
    _of_tables(GAUGE, "bytes", "Bytes of these rows with state, index and counts.", "server", ["bytes"]),
    _of_tables(GAUGE, "counted_ids", "Ids without a row whose updates this server counts.", "server", ["counted"]),
    _of_tables(COUNTER, "updates", "Updates of rows of the table on this server.", "server", ["updates"]),
    _of_tables(COUNTER, "evicted_rows", "Rows that this server has dropped.", "server", ["evicted"]),
    _of_tables(COUNTER, "removed_rows", "Rows that the program has removed.", "server", ["removed"]),
    _of_tables(COUNTER, "refused_gradients", "Gradients of ids that got no row.", "server", ["refused"]),
    _of_tables(COUNTER, "pushed_rows", "Rows whose gradients this worker has pushed.", "worker", ["pushed"]),
    _of_tables(COUNTER, "pulled_rows", "Rows that this worker has pulled.", "worker", ["asked", "in_place"]),
    _of_tables(
        COUNTER,
        "in_place_rows",
        "Pulled rows that this worker has read directly in the servers' memory.",
        "worker",
        ["in_place"],
    ),
    _of_tables(
        COUNTER,
        "refused_pushes",
        "Pushes of this worker for which a server had no memory.",
        "worker",
        ["refused_pushes"],
    ),
    RankMetric(
        COUNTER,
        "mpips_quorum_rounds",
        "Rounds of keys that a quorum has closed on this server.",
        lambda rank: float(rank.quorum_rounds) if rank.quorum_rounds >= 0 else None,
    ),
    RankMetric(
        COUNTER,
        "mpips_quorum_missed_rounds",
        "Rounds of keys that have closed before this worker's push arrived.",
        lambda rank: rank.missed,
        "worker",
    ),
    RankMetric(
        COUNTER,
        "mpips_exchanges",
        "Exchanges of parameters of a worker that trains by itself between them.",
        lambda rank: float(rank.exchanges) if rank.exchanges else None,
    ),
    RankMetric(
        COUNTER,
        "mpips_exchanged_bytes",
        "Bytes of these exchanges, in both directions.",
        lambda rank: float(rank.exchanged_bytes) if rank.exchanges else None,
    ),
    RankMetric(
        GAUGE,
        "mpips_exchange_age_seconds",
        "Seconds since the last exchange ended.",
        lambda rank: rank.exchange_seconds if rank.exchanges and rank.lives else None,
    ),
    RankMetric(
        COUNTER,
        "mpips_failures",
        "Generations and communicators that have ended by an error.",
        lambda rank: float(rank.failures),
    ),
    RankMetric(
        COUNTER, "mpips_checkpoints", "Checkpoints that this rank has written.", lambda rank: float(rank.checkpoints)
    ),
    RankMetric(
        COUNTER,
        "mpips_cpu_seconds",
        "Processor time of the rank, in user mode and in the kernel.",
        lambda rank: rank.cpu_seconds if rank.lives else None,
    ),
    RankMetric(
        GAUGE,
        "mpips_resident_memory_bytes",
        "Resident memory of the rank's process.",
        lambda rank: float(rank.memory_bytes) if rank.lives else None,
    ),
)


class JobMetrics(Collector):
    """The metrics of all jobs of this user on this host, or of one job. Each `collect` reads the ranks' pages."""

    def __init__(self, job: str | None = None) -> None:
        self._job = job

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. prometheus_client calls this for each request."""
        ranks = [
            (path.name, rank, is_replaced(rank, members))
            for path in jobs()
            if self._job in (None, path.name)
            for members in [gather(path, seconds=0.0, stacks=False)]
            for rank in members
        ]
        labels = (*LABELS, "role", "host", "program")
        info = GAUGE("mpips_rank_info", "A rank, its role, host and program.", labels=labels)
        for job, rank, _ in ranks:
            info.add_metric([job, str(rank.rank), rank.role, rank.host, " ".join(rank.program[:1])], 1)
        yield info
        for definition in DEFINITIONS:
            family = definition.kind(definition.name, definition.text, labels=(*LABELS, *definition.label.split()))
            for job, rank, replaced in ranks:
                value = definition.value(rank)
                if isinstance(value, Mapping):
                    for label, number in value.items():
                        family.add_metric([job, str(rank.rank), label], number)
                elif value is not None and not (replaced and definition.name == "mpips_rank_up"):
                    family.add_metric([job, str(rank.rank)], value)
            yield family


def write(folder: Path, job: str | None = None) -> Path:
    """Write all metrics to a file in node_exporter's folder, atomically, and return its path.

    With `job`, write only the metrics of this job, to a separate file. Raises OSError if the file cannot be written.
    """
    path = folder / (FILE if job is None else f"mpips-{job}.prom")
    write_to_textfile(str(path), _registry(job))
    return path


@contextmanager
def serving(host: str, port: int, job: str | None = None) -> Iterator[int]:
    """Context manager that serves the metrics of all jobs, or of one job, at http://host:port/metrics. Yields the port.

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
        folder: Write the metrics to a file in this folder, which node_exporter reads. None: write no file.
        address: Serve the metrics at this "[HOST:]PORT". None: do not serve them.
        job: The name of the job.

    Raises:
        UsageError: The folder does not exist, or the file or the port cannot be used.
    """
    if folder is not None and not Path(folder).is_dir():
        raise click.UsageError(
            f"--metrics {folder!r} is not a folder: name the one that node_exporter reads, or make it"
        )
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
    """Context manager whose thread regularly writes the metrics of a job to a file. Removes the file at the end."""
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
    """Write the file every `EVERY_SECONDS`, and at once when ranks have begun or ended.

    Without the writes at once, a job that is shorter than `EVERY_SECONDS` would have no metrics.
    """
    known, due = 0, time.monotonic() + EVERY_SECONDS
    while not ended.wait(LOOK_SECONDS):
        pages = len(list((folders.jobs_folder() / job).glob(f"*{folders.PAGE}")))
        if pages != known or time.monotonic() >= due:
            known, due = pages, time.monotonic() + EVERY_SECONDS
            # The disk may be full. In that case skip this write, because the job must continue.
            with suppress(OSError):
                write(folder, job)


def _registry(job: str | None) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(JobMetrics(job))
    return registry
