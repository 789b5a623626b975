"""The stages of `make gpu`, one after the other, each with a time limit: out/gpu.json and out/gpu.md.

    python -m tests.gpu.stages [--out out] [--seconds 460] [--only TEXT]

A stage is a run of tests marked `gpu`, or a program that writes rows. One that fails or hangs is ended and reported,
and the others go on. The exit code is 1 if any failed. `tests.gpu` starts this in a Python that has all it needs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from collectives.machine import usable_cores
from collectives.terminal import show_bytes, show_table, write_json, write_text
from launch import Job, build, find, this_machine
from tests import child, run
from tests.report import Result

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]
LAST = 4000  # characters of a failed stage's output that are shown
CARD = """
import cupy, importlib.util, json
runtime, name = cupy.cuda.runtime, lambda p: p["name"].decode()
every = [runtime.getDeviceProperties(number) for number in range(runtime.getDeviceCount())]
first, torch = every[0], importlib.util.find_spec("torch") and __import__("torch").__version__
print(json.dumps({"name": name(first), "cards": len(every), "GiB": round(first["totalGlobalMem"] / 2**30, 1),
    "multiprocessors": first["multiProcessorCount"], "capability": f'{first["major"]}.{first["minor"]}',
    "driver": runtime.driverGetVersion(), "CUDA": runtime.runtimeGetVersion(), "CuPy": cupy.__version__,
    "PyTorch": torch and str(torch)}))
"""
MACHINE = "import json; from collectives.benchmark.report import machine; print(json.dumps(machine()))"


class Stage(NamedTuple):
    """A run: its name, the table that its rows go to, seconds that it may take, and what runs it within a limit."""

    name: str
    table: str
    limit: float
    run: Callable[[run.Limits, BytesIO], tuple[Result, list[Row]]]


def unit(name: str, limit: float, *places: str) -> Stage:
    """Return a stage of tests that need one process."""
    words = run.Choice(("-m", "gpu", *places))
    return Stage(name, "", limit, lambda limits, out: (run.alone(name, words, limits, out), []))


def ranks(name: str, count: int, limit: float, *places: str) -> Stage:
    """Return a stage of tests on so many ranks."""
    name, words = f"{name}, {count} ranks", run.Choice(("-m", "gpu", *places))
    return Stage(name, "", limit, lambda limits, out: (run.ranks(sys.executable, count, words, limits, out), []))


def program(name: str, table: str, count: int, limit: float, *words: str) -> Stage:
    """Return a stage of a program, `python -m WORDS`, on so many ranks; ROWS stands for the file that it writes."""

    def measure(limits: run.Limits, out: BytesIO) -> tuple[Result, list[Row]]:
        started, limit = time.monotonic(), limits.now()
        with tempfile.TemporaryDirectory() as folder:
            rows_at = Path(folder, "rows.json")
            argv = [sys.executable, "-m", *(str(rows_at) if word == "ROWS" else word for word in words)]
            if count > 1:
                argv = build(find(), Job(count, tuple(argv), {"OMP_NUM_THREADS": "1"}), this_machine())
            code = child.run(argv, limit, ROOT, out)
            rows: list[Row] = json.loads(rows_at.read_text()) if rows_at.is_file() else []
        failures = [f"not as asked: {show_row(row)}" for row in rows if row.get("ok") is False or row.get("wrong")]
        passed, seconds = len(rows) - len(failures), time.monotonic() - started
        if seconds >= limit:
            failures.append(f"ended, as it was not done after {limit:.0f} s")
        elif code and not failures:
            failures.append(f"exit code {code}")
        elif not rows:
            failures.append("it has written no rows")
        return Result(name, passed, len(failures), 0, seconds, tuple(failures)), rows

    return Stage(name, table, limit, measure)


BANDWIDTH, TENSOR = "The fused kernel beside copies", "Allreduce of two vectors a rank on the card"
ALLREDUCE, STORE = "Allreduce beside the MPI's, on the host", "Push and pull, on the host"
MPI_NAME = "MPI"  # of the MPI's own call, in rows of collectives.benchmark
SIZES = "1KiB,64KiB,1MiB,16MiB"
COUNTS = (2, 4, 8, 16)
KERNELS = "tests/unit/collectives/test_kernels.py"
TENSORS = "tests/mpi/collectives/test_tensor.py"
STREAMS = "tests/mpi/collectives/test_streams.py"
ARRAYS = "tests/mpi/mpips/test_store_arrays.py"
DEVICES = "tests/mpi/mpips/mlp/test_devices.py"


def on_the_card() -> list[Stage]:
    """Return what needs a card."""
    stages = [
        unit("kernels", 75, KERNELS),
        program("bandwidth", BANDWIDTH, 1, 40, "tests.gpu.bandwidth", "ROWS"),
    ]
    for count in (2, 4):
        stages += [
            ranks("collectives, arrays of CuPy and PyTorch", count, 75, TENSORS),
            ranks("streams and events under load", count, 45, STREAMS),
            ranks("store", count, 40, ARRAYS),
            ranks("MLP", count, 40, DEVICES),
            program(f"tensor, {count} ranks", TENSOR, count, 45, "tests.gpu.tensor", "ROWS"),
        ]
    return stages


def on_the_cores(counts: Sequence[int] = COUNTS, sizes: str = SIZES, seconds: float = 0.4) -> list[Stage]:
    """Return what needs many cores: those of these numbers of ranks that have a core each."""
    stages = []
    for count in counts:
        if count <= usable_cores():
            common = "--sizes", sizes, "--seconds", str(seconds), "--json", "ROWS"
            allreduce = "collectives.benchmark", "allreduce", "--check", *common
            store = "mpips.bench.kvstore", "--servers", str(max(1, count // 4)), *common
            stages += [
                program(f"allreduce, {count} ranks", ALLREDUCE, count, 25, *allreduce),
                program(f"push and pull, {count} ranks", STORE, count, 25, *store),
            ]
    return stages


def check(stages: Sequence[Stage], seconds: float, say: Callable[[str], None] = print) -> Iterator[Row]:
    """Run the stages, all of them within so many seconds; yield a record of each as it ends."""
    end = time.monotonic() + seconds
    for number, stage in enumerate(stages, 1):
        limit, out = min(stage.limit, end - time.monotonic()), BytesIO()
        say(f"[{number}/{len(stages)}] {stage.name}, at most {max(limit, 0):.0f} s")
        result = Result(stage.name, 0, 1, failures=("no time was left for it",))
        rows: list[Row] = []
        if limit > 1:
            try:
                result, rows = stage.run(run.Limits(limit, limit), out)
            except Exception as error:
                result = result._replace(failures=(f"{type(error).__name__}: {error}",))
        if not result.passed and not result.failed:
            result = result._replace(failed=1, failures=("nothing has run",))
        say("    " + str(result._replace(name="failed" if result.failed else "passed")))
        if result.failed:
            say("\n".join(result.failures) + "\n" + out.getvalue().decode(errors="replace")[-LAST:])
        counts = {key: value for key, value in result._asdict().items() if key not in ("name", "times")}
        yield {"name": stage.name, "table": stage.table, "limit": stage.limit, "rows": rows, **counts}


def beside_mpi(records: Sequence[Row]) -> None:
    """Put the MPI's own allreduce of as many bytes on as many ranks into the rows of the store."""
    rows = [row for record in records for row in record["rows"] if record["table"] == ALLREDUCE]
    mpi = {(row["ranks"], row["bytes"]): row["p50_us"] / 1e6 for row in rows if row["algorithm"] == MPI_NAME}
    for row in (row for record in records for row in record["rows"] if record["table"] == STORE):
        row["MPI_allreduce_s"] = mpi.get((row["servers"] + row["workers"], row["bytes"]))


def told(program: str) -> Row:
    """Return what a program prints as JSON; {"problem": ...} where it fails."""
    argv = [sys.executable, "-c", program]
    try:
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except subprocess.CalledProcessError as error:
        return {"problem": (error.stderr.strip() or str(error)).splitlines()[-1]}
    except subprocess.TimeoutExpired as error:
        return {"problem": f"no answer in {error.timeout:.0f} s"}
    return json.loads(done.stdout)


def surroundings() -> Row:
    """Return on what the stages run: the card, the machine, the commit."""
    commit = None
    if shutil.which("git"):
        argv = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or None
    when = datetime.now(UTC).isoformat(timespec="seconds")
    return {"card": told(CARD), "machine": told(MACHINE), "commit": commit, "when": when}


def report(where: Row, records: Sequence[Row], seconds: float) -> Row:
    """Return what gpu.json holds."""
    ok = "problem" not in where["card"] and not any(record["failed"] for record in records)
    return {**where, "seconds": round(seconds, 1), "ok": ok, "stages": list(records)}


# ---- the page

COLUMNS: dict[str, tuple[str, ...]] = {
    ALLREDUCE: ("ranks", "bytes", "algorithm", "array", "p50_us", "busbw_GBps", "vs_native", "wrong"),
    STORE: ("servers", "workers", "bytes", "array", "push_pull_s", "pushpull_s", "MPI_allreduce_s", "over_floor"),
}
"""Of rows that have more of them than a page."""


def show_value(name: str, value: Any) -> str:
    """Return a cell."""
    if name == "bytes":
        return show_bytes(value)
    if name.endswith("_s") and value is not None:
        return f"{1e6 * value:,.0f} us"
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
    return "-" if value is None else str(value)


def show_row(row: Row) -> str:
    """Return a row as a sentence."""
    return ", ".join(f"{name} {show_value(name, value)}" for name, value in row.items())


def table(head: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *cells]) + "\n"


def page(found: Row) -> str:
    """Return gpu.md."""
    card, stages = found["card"], found["stages"]
    verdict = "All checks passed." if found["ok"] else "**Some checks failed.**"
    parts = [f"# mpips on {card.get('name', 'a card that CuPy does not see')}\n"]
    parts.append(f"{verdict} {found['when']}, {found['seconds']:.0f} s, commit {found['commit'] or 'unknown'}.\n")
    parts.append(table(("what", "which"), [(name, str(value)) for name, value in (card | found["machine"]).items()]))
    counts = ("passed", "failed", "skipped", "seconds", "limit")
    lines = [[stage["name"], *(f"{stage[name]:.0f}" for name in counts)] for stage in stages]
    parts.append("## Stages\n\n" + table(("stage", *counts), lines))
    failures = [f"- {stage['name']}: {failure}" for stage in stages for failure in stage["failures"]]
    if failures:
        parts.append("## Failures\n\n" + "\n".join(failures) + "\n")
    for title in dict.fromkeys(stage["table"] for stage in stages if stage["rows"]):
        rows = [row for stage in stages if stage["table"] == title for row in stage["rows"]]
        head = COLUMNS.get(title, tuple(rows[0]))
        cells = [[show_value(name, row.get(name)) for name in head] for row in rows]
        parts.append(f"## {title}\n\n" + table(head, cells))
    return "\n".join(parts)


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Check mpips on a card.")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, run.stop)
    started, where = time.monotonic(), surroundings()
    stages = [stage for stage in on_the_card() + on_the_cores() if asked.only in stage.name]
    if not stages:
        sys.exit(f"mpips: no stage has {asked.only!r} in its name")
    asked.out.mkdir(parents=True, exist_ok=True)
    records: list[Row] = []
    for record in check(stages, asked.seconds):
        records.append(record)
        beside_mpi(records)
        found = report(where, records, time.monotonic() - started)
        write_json(asked.out / "gpu.json", found)  # each time: what ends us may come at any time
        write_text(asked.out / "gpu.md", page(found))
    card = where["card"]
    view = Table(title=f"{card.get('name', card.get('problem'))}, {found['seconds']:.0f} s")
    for name in ("stage", "passed", "failed", "skipped", "seconds"):
        view.add_column(name, justify="left" if name == "stage" else "right")
    for record in records:
        view.add_row(record["name"], *(f"{record[name]:.0f}" for name in ("passed", "failed", "skipped", "seconds")))
    show_table(view)
    print(f"mpips: {asked.out / 'gpu.json'} and {asked.out / 'gpu.md'} are written")
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
