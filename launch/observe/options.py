"""Options of `mpips run` for observing the job: metrics, a live page, a timeline, and a table of calls at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import click

from mpips.collectives.recorder import folders
from mpips.collectives.recorder import own as recorder
from mpips.collectives.terminal import OutFile

OBSERVED = ("trace", "summary", "summary_json", "metrics", "metrics_port", "page")


def observe_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator that adds the options for observing a job. `observing` takes the values of these options."""
    for option in (
        click.option("--summary-json", type=OutFile(), help="Write the table of --summary as JSON."),
        click.option(
            "--summary", is_flag=True, help="Print at the end how long calls took, and which rank made others wait."
        ),
        click.option(
            "--trace",
            type=OutFile(),
            metavar="FILE",
            help="Write one timeline of all ranks, for Perfetto and chrome://tracing.",
        ),
        click.option(
            "--page", metavar="[HOST:]PORT", help="Serve a live page of the ranks on all hosts, for a browser."
        ),
        click.option("--metrics-port", metavar="[HOST:]PORT", help="Serve this host's metrics for Prometheus."),
        click.option("--metrics", metavar="DIR", help="Write this host's metrics to this folder, for node_exporter."),
    ):
        command = option(command)
    return command


def check_recorder(observed: Mapping[str, object]) -> None:
    """Check that the ranks' pages are not switched off, if an option of this module needs them.

    A page is a file in memory in which a rank writes what it does. Also makes the folder for dumps, if an environment
    variable names one. `observed` maps the options in `OBSERVED` to their values. Raises UsageError if pages are needed
    but switched off, or if the folder cannot be made. Raises ValueError if a variable has a wrong value.
    """
    folder = os.environ.get(recorder.DUMP_VARIABLE)
    if not recorder.is_wanted():
        needing = [f"--{name.replace('_', '-')}" for name in OBSERVED if observed[name]]
        if needing := needing + [recorder.DUMP_VARIABLE] * bool(folder):
            raise click.UsageError(
                f"{recorder.VARIABLE}=0 leaves out the ranks' pages, without which there is no "
                f"{', '.join(needing)}: unset that variable"
            )
    elif folder:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            named = f"{recorder.DUMP_VARIABLE}={folder!r}"
            raise click.UsageError(f"{named} cannot be made: {error.strerror}: name a folder") from None


@contextmanager
def observing(
    trace: Path | None,
    summary: bool,
    summary_json: Path | None,
    metrics: str | None,
    metrics_port: str | None,
    page: str | None,
    several: bool,
) -> Iterator[None]:
    """Context manager around the run of a job. It makes the trace, summary, metrics and page that the options ask for.

    Args:
        trace: Write the timeline to this file.
        summary: True to print the table of calls at the end.
        summary_json: Write the table of calls to this file as JSON.
        metrics: Write metrics to this folder.
        metrics_port: Serve metrics at this "[HOST:]PORT".
        page: Serve a live web page at this "[HOST:]PORT".
        several: True if some ranks of the job are on other hosts.
    """
    folder = folders.jobs_folder() / folders.job_name({folders.JOB: str(os.getpid())})
    tracing = _tracing(folder, several, trace, summary, summary_json)
    with _exporting(metrics, metrics_port), _serving_page(page, folder), tracing:
        yield


def _tracing(
    folder: Path, several: bool, trace: Path | None, summary: bool, as_json: Path | None
) -> AbstractContextManager[None]:
    if not (trace or summary or as_json):
        return nullcontext()
    # Imported late, because most jobs are not traced.
    from mpips.launch.observe.trace import tracing_job

    return tracing_job(folder, several, trace, summary, as_json)


def _exporting(folder: str | None, address: str | None) -> AbstractContextManager[None]:
    """Return a context manager that exports metrics. If neither option is given, it does nothing."""
    if folder is None and address is None:
        return nullcontext()
    try:
        from mpips.launch.observe.metrics import exporting
    except ModuleNotFoundError as error:
        raise click.UsageError(f"--metrics needs {error.name}: pip install 'mpips[metrics]'") from None
    return exporting(folder, address, str(os.getpid()))


@contextmanager
def _serving_page(address: str | None, folder: Path) -> Iterator[None]:
    """Context manager that serves a live web page and prints its address. Does nothing if `address` is None."""
    if address is None:
        yield
        return
    from mpips.launch.observe.live import serving

    with serving(address, folder) as url:
        click.echo(f"mpips: {url}", err=True)
        yield
