"""Run every mode of training, each as a separate job, and write a table, a picture and a JSON file.

python examples/demo.py --out out
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from arguments import number_parser
from collectives import files
from launch import Job, LauncherError, check_room
from picture import SERIAL, draw

HERE = Path(__file__).resolve().parent
# test accuracy that every mode must reach
TARGET = 0.95
# number of training images. It is not read from the module `task`, because importing that would start MPI.
IMAGES = 1437
FILES = ("demo.png", "demo.json")
PLOT = "pip install matplotlib (or, in a clone, '.[plot]')"
# Each process gets one compute thread, because the ranks share the cores. This includes the serial run.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Mode(NamedTuple):
    """A mode of training."""

    name: str
    # the file of the example
    script: str
    # the value of the example's option --kind, or "" if it has no such option
    kind: str = ""
    # True if the mode needs servers
    servers: bool = True
    # True if the workers form clients
    clients: bool = False
    # False if the mode is a single process, which needs no launcher
    launched: bool = True


MODES = (
    Mode("serial", "serial.py", servers=False, launched=False),
    Mode("dist-SGD", "sgd.py", "dist_sync"),
    Mode("dist-ASGD", "asgd.py", "dist_async"),
    Mode("dist-ESGD", "esgd.py", "dist_async"),
    Mode("mpi-SGD", "sgd.py", "mpi_sync", clients=True),
    Mode("mpi-ASGD", "asgd.py", "mpi_async", clients=True),
    Mode("mpi-ESGD", "esgd.py", "mpi_async", clients=True),
    Mode("pure MPI", "pure_mpi.py", servers=False),
)


# exit code of `timeout` when the limit was reached
EXPIRED = 124


class JobError(RuntimeError):
    """A job ended with an error. The message has what it printed."""


def command(mode: Mode, options: argparse.Namespace) -> list[str]:
    """Return the command that a user would type for this mode.

    The serial run gets a batch as large as the batches of all workers together.
    """
    workers = options.workers if mode.launched else 1
    batch = options.batch_size * (1 if mode.launched else options.workers)
    script = [str(HERE / mode.script), "--lines", "1", "--epochs", str(options.epochs), "--batch-size", str(batch)]
    if mode.kind:
        script += ["--kind", mode.kind]
    if not mode.launched:
        return [sys.executable, *script]
    roles = ["--workers", str(workers), "--servers", str(options.servers if mode.servers else 0)]
    if mode.clients:
        roles += ["--clients", str(options.clients)]
    return [sys.executable, "-m", "launch.cli", "run", *roles, *script]


def epochs(argv: list[str], limit: float) -> Iterator[dict[str, Any]]:
    """Run a job, and yield its report of each epoch. Raise JobError if it fails or runs longer than `limit` seconds."""
    with tempfile.TemporaryFile("w+") as errors:
        job = subprocess.Popen(
            ["timeout", str(limit), *argv], stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT
        )
        assert job.stdout is not None
        try:
            for line in job.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            code = job.wait()
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait()
        if code:
            errors.seek(0)
            how = f"did not end within {limit:g} seconds (--limit)" if code == EXPIRED else f"ended with code {code}"
            raise JobError(f"{' '.join(argv)}\n{how}:\n{errors.read()}")


class Board:
    """The table on the screen, with a row for each mode."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        roles = [(options.workers, "worker"), (options.servers, "server"), (options.clients, "MPI client")]
        counts = ", ".join(f"{number} {role}{'s' if number != 1 else ''}" for number, role in roles)
        self.title = f"Handwritten digits: {counts}"
        self.records: dict[str, list[dict[str, Any]]] = {}

    def __rich__(self) -> Table:
        view = Table(title=self.title, title_justify="left", caption=SERIAL, caption_justify="left")
        for column in ("mode", "epochs", "loss", "test accuracy", "seconds", ""):
            view.add_column(column, justify="left" if column in ("mode", "epochs") else "right")
        for mode in MODES:
            view.add_row(mode.name, *self._cells(self.records.get(mode.name, [])))
        return view

    def _cells(self, records: list[dict[str, Any]]) -> tuple[Any, ...]:
        if not records:
            return (ProgressBar(self.options.epochs, 0, width=20), "", "", "", "")
        last = records[-1]
        done = len(records) == self.options.epochs
        verdict = ("[green]passed" if last["test_accuracy"] >= TARGET else "[red]below") if done else "..."
        bar = ProgressBar(self.options.epochs, len(records), width=20)
        return bar, f"{last['loss']:.4f}", f"{last['test_accuracy']:.3f}", f"{last['seconds']:.2f}", verdict


def summary(mode: Mode, records: list[dict[str, Any]], options: argparse.Namespace, wall: float) -> dict[str, Any]:
    """Return the entry of a mode in demo.json.

    "seconds" is the time of the training. "job_seconds" is the time of the whole job, which includes its start.
    """
    last = records[-1]
    return {
        "mode": mode.name,
        "test_accuracy": last["test_accuracy"],
        "seconds": last["seconds"],
        "job_seconds": wall,
        "loss": last["loss"],
        "epochs": len(records),
        "workers": options.workers if mode.launched else 1,
        "servers": options.servers if mode.servers else 0,
        "clients": (options.clients if mode.clients else options.workers) if mode.servers else 1,
        "passed": last["test_accuracy"] >= TARGET,
        "curve": [[record["seconds"], record["test_accuracy"]] for record in records],
    }


def read(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the options. Exit with a message if a job could not run with them, or the results could not be written."""
    positive = number_parser(int, 1)
    parser = argparse.ArgumentParser(description="Train on handwritten digits in every mode.")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of demo.png and demo.json")
    parser.add_argument("--workers", type=positive, default=4)
    parser.add_argument("--servers", type=positive, default=2)
    parser.add_argument("--clients", type=positive, default=2, help="MPI clients of the mpi-* modes")
    parser.add_argument("--epochs", type=positive, default=40)
    parser.add_argument("--batch-size", type=positive, default=16, help="samples of each worker in a step")
    parser.add_argument(
        "--limit", type=number_parser(float, 1), default=240, help="seconds after which a mode's job is ended"
    )
    options = parser.parse_args(arguments)
    if options.clients > options.workers:
        parser.error(f"{options.clients} clients need as many workers, not {options.workers}")
    images = options.workers * options.batch_size
    if images > IMAGES:
        settings = f"--workers {options.workers} with --batch-size {options.batch_size}"
        parser.error(f"{settings} take {images:,} images a step, and there are {IMAGES:,}: ask for fewer")
    try:
        check_room(Job(options.workers + options.servers, ()), {})
    except LauncherError as error:
        parser.error(str(error))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out}: results cannot be written there: {error.strerror}")
    if not os.access(options.out, os.W_OK):
        parser.error(f"--out {options.out}: results cannot be written there")
    return options


class Terminated(BaseException):
    """Raised on SIGTERM, so that SIGTERM ends the running job as Ctrl-C does."""


def terminate(*_: object) -> NoReturn:
    raise Terminated


def main() -> int:
    """Run the command line. Return the exit code: 0 on success, 130 after Ctrl-C, 143 after SIGTERM, otherwise 1."""
    options = read()
    signal.signal(signal.SIGTERM, terminate)
    try:
        return run(options)
    except JobError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Terminated) as error:
        print("demo: interrupted; no results are written", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def run(options: argparse.Namespace) -> int:
    """Run all modes. Return 0 if every mode reaches the target and both files could be written, otherwise 1."""
    console, board, results = Console(), Board(options), []
    with Live(board, console=console, refresh_per_second=8) if console.is_terminal else nullcontext():
        for mode in MODES:
            start = time.perf_counter()
            records = board.records[mode.name] = []
            for record in epochs(command(mode, options), options.limit):
                records.append(record)
            results.append(summary(mode, records, options, time.perf_counter() - start))
            if not console.is_terminal:
                last = results[-1]
                print(f"{mode.name}: test accuracy {last['test_accuracy']:.3f} in {last['seconds']:.2f} s", flush=True)
    if not console.is_terminal:
        console.print(board)
    console.print()
    written = write(results, board.title, options.out)
    if written:
        console.print(f"{' and '.join(map(str, written))} {'are' if len(written) > 1 else 'is'} written.")
    below = [result["mode"] for result in results if not result["passed"]]
    if below:
        console.print(f"[red]below a test accuracy of {TARGET}: {', '.join(below)}")
    return 1 if below or len(written) < len(FILES) else 0


def write(results: list[dict[str, Any]], title: str, out: Path) -> list[Path]:
    """Write the two files, and return those that could be written. For the others, print the reason."""
    written = []
    for path in (out / name for name in FILES):
        try:
            if path.suffix == ".png":
                draw(results, TARGET, title, path)
            else:
                files.write(path, json.dumps(results, indent=1).encode() + b"\n")
            written.append(path)
        except OSError as error:
            print(f"demo: {path} cannot be written: {error.strerror or error}", file=sys.stderr)
        except ModuleNotFoundError:
            print(f"demo: {path} is drawn by matplotlib, which is missing: {PLOT}", file=sys.stderr)
    return written


if __name__ == "__main__":
    sys.exit(main())
