"""Compare the speed of two checkouts: `python -m tests.beside OTHER [--rounds 5] [--rows TEXT] [--json FILE]`.

Every round measures the other checkout, then this one, and then the other one again. The medians of all rounds are
compared. The column `again` is the ratio of the other checkout's second times to its first times, which shows how much
times of the same code vary. If this Python has no PyTorch, rows that need it are left out.

    git worktree add ../old e292923 && python -m tests.beside ../old
    git worktree add ../old a70c988 && python -m tests.beside ../old --rows updates
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import launch

ROOT = Path(__file__).resolve().parent.parent
# seconds that a job may take
LIMIT = 300
SIZES = "8,1KiB,32KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
KEYS = "1KiB,16KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
# the contenders of the DDP benchmark that are mpips
OURS = ("mpips", "DataParallel")
# how many jobs measure recover(), each with one death
REPEATS = 5
RECOVER = """
import json, os, signal, sys, time

import numpy as np
import mpips

Error = getattr(mpips, "StoreError", None) or mpips.EpochError
kv = mpips.create("dist_sync")
step, took = kv.resumed, None
keys = [f"w{number}" for number in range(16)]
while step < 20:
    try:
        values = [np.zeros(65536, np.float32) for _ in keys]
        kv.init(keys, values)
        while step < 20:
            if step == 10 and kv.rank == 1 and not kv.resumed:
                os.kill(os.getpid(), signal.SIGKILL)
            begun = time.perf_counter()
            kv.push(keys, values)
            kv.pull(keys, values)
            step += 1
    except Error:
        step = kv.recover().step
        took = time.perf_counter() - begun
if kv.rank == 0:
    with open(sys.argv[1], "w") as file:
        json.dump([{"seconds": took}], file)
kv.close()
"""

UPDATES = """
import json, statistics, sys, time

import numpy as np
import mpips

kv = mpips.create("dist_sync", servers=int(sys.argv[1]))
rows = []
for name, options in (("sgd", {"momentum": 0.9}), ("adam", {})):
    kv.set_optimizer(name, learning_rate=0.001, **options)
    cases = [(1 << power, array) for power in range(14, 25, 2) for array in ("ordinary", "empty")]
    for n, array in cases:
        kv.init(f"{name} {n} {array}", np.zeros(n, np.float32))
    value, out = np.ones(1 << 24, np.float32), np.empty(1 << 24, np.float32)
    for _ in range(15):  # so much that servers of a checkout that has kernels compile them
        kv.pushpull(f"{name} {1 << 24} empty", value, out=out)
    kv.barrier()
    time.sleep(2.5)
    for n, array in cases:
        key, value, out = f"{name} {n} {array}", *(np.empty(n, np.float32) for _ in range(2))
        if array == "empty":
            value, out = mpips.empty(n), mpips.empty(n)
        value[:] = np.random.default_rng(kv.rank).random(n, np.float32)
        times = []
        for _ in range(3 + min(400, max(9, (1 << 25) // n))):
            before = out[-1]
            kv.barrier()
            begun = time.perf_counter()
            kv.push(key, value)
            kv.pull(key, out)
            times.append(time.perf_counter() - begun)
            assert len(times) == 1 or out[-1] < before, "no update came back"
        words = {"sgd": "SGD momentum", "adam": "Adam"}[name], f"{4 * n:,} bytes", array
        rows.append({"case": ", ".join(words), "seconds": statistics.median(times[3:])})
if kv.rank == 0:
    with open(sys.argv[2], "w") as file:
        json.dump(rows, file)
kv.close()
"""


class Job(NamedTuple):
    """A program that writes its results as rows of JSON."""

    name: str
    ranks: int
    # The arguments. {out} stands for the file of results, {program} for a file with the text `program`.
    words: tuple[str, ...]
    # what starts it: "mpirun" (with python -m), "mpips bench" or "mpips run"
    by: str = "mpirun"
    # a program that needs only the public API of a checkout, or ""
    program: str = ""

    def command(self, out: Path, program: Path) -> list[str]:
        """Return the command that writes its rows to `out`. Write `self.program` to the file `program`."""
        program.write_text(self.program)
        arguments = [word.format(out=out, program=program) for word in self.words]
        if self.by == "mpips bench":
            return [sys.executable, "-m", "launch.cli", "bench", *arguments, "-n", str(self.ranks)]
        if self.by == "mpips run":
            return [sys.executable, "-m", "launch.cli", "run", *arguments]
        started = launch.Job(self.ranks, (sys.executable, "-m", *arguments), {"OMP_NUM_THREADS": "1"})
        return launch.build(launch.find(python=sys.executable), started, launch.this_machine())


def jobs() -> list[Job]:
    """Return all jobs of a round."""
    every = []
    for ranks in (2, 4):
        arguments = ("--sizes", SIZES, "--seconds", "0.25", "--json", "{out}")
        every.append(
            Job(f"allreduce, {ranks} ranks, mpirun", ranks, ("collectives.benchmark", "allreduce", *arguments))
        )
        every.append(Job(f"allreduce, {ranks} ranks, mpips run", ranks, ("allreduce", *arguments), "mpips bench"))
    for servers, workers in ((1, 2), (2, 4)):
        arguments = ("--servers", str(servers), "--sizes", KEYS, "--seconds", "0.25", "--json", "{out}")
        name = f"store, {servers} + {workers}"
        every.append(Job(name, servers + workers, ("mpips.bench.kvstore", *arguments)))
        arguments = ("-s", str(servers), "-w", str(workers), "{program}", str(servers), "{out}")
        every.append(Job(f"updates, {servers} + {workers}", servers + workers, arguments, "mpips run", UPDATES))
    if importlib.util.find_spec("torch"):
        arguments = ("--models", "mlp-0.3M,mlp-4M,cnn", "--seconds", "3", "--rounds", "3", "--json", "{out}")
        every.append(Job("DDP", 2, ("examples.reproduce.torch.ddp", *arguments)))
    arguments = ("-s", "1", "-w", "3", "--spares", "1", "{program}", "{out}")
    every.extend([Job("recover() after a worker's death", 5, arguments, "mpips run", RECOVER)] * REPEATS)
    return every


def measure(checkout: Path, job: Job, folder: Path) -> Iterator[tuple[str, float]]:
    """Run a job with the code of a checkout. Yield the name of each row and its seconds."""
    out, program = folder / "rows.json", folder / "program.py"
    out.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        job.command(out, program),
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode or not out.exists():
        sys.exit(f"{checkout}: {job.name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    for row in json.loads(out.read_text()):
        if "p50_us" in row:
            if row["algorithm"] == "auto":
                yield f"{job.name}, {row['bytes']:,} bytes, {row['array']}", row["p50_us"] / 1e6
        elif "push_pull_s" in row:
            yield f"{job.name}, push + pull, {row['bytes']:,} bytes, {row['array']}", row["push_pull_s"]
            yield f"{job.name}, pushpull, {row['bytes']:,} bytes, {row['array']}", row["pushpull_s"]
        elif "step_s" in row:
            if row["contender"] in OURS:
                yield f"{job.name}, {row['model']}, {row['contender']}", row["step_s"]
        else:
            yield ", ".join(filter(None, (job.name, row.get("case")))), row["seconds"]


def show(times: dict[str, list[list[float]]]) -> list[dict[str, float | str]]:
    """Print the table of all rows, and return the rows. `times`: row -> seconds of the other, this, the other again."""
    table, rows = Table(title="This checkout beside another: medians"), []
    for name in ("row", "other", "this", "this / other", "again"):
        table.add_column(name, justify="left" if name == "row" else "right")
    for name, (other, this, again) in times.items():
        first, current, second = (statistics.median(values) for values in (other, this, again))
        base = statistics.median([*other, *again])
        rows.append({"row": name, "other_s": base, "this_s": current, "ratio": current / base, "again": second / first})
        cells = (f"{base * 1e6:,.1f} us", f"{current * 1e6:,.1f} us", f"{current / base:.2f}", f"{second / first:.2f}")
        table.add_row(name, *cells)
    Console(width=120).print(table)
    for name in ("ratio", "again"):
        mean = math.exp(statistics.fmean(math.log(float(row[name])) for row in rows))
        print(f"geometric mean of {name}: {mean:.3f}; above 1.10: {sum(float(row[name]) > 1.1 for row in rows)}")
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Time this checkout beside another.")
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", default="", help="only jobs with this in their name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [job for job in jobs() if options.rows in job.name]
    times: dict[str, list[list[float]]] = defaultdict(lambda: [[], [], []])
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for job in chosen:
                for place, checkout in enumerate((options.other.resolve(), ROOT, options.other.resolve())):
                    for row, seconds in measure(checkout, job, Path(folder)):
                        times[row][place].append(seconds)
            seconds = time.monotonic() - begun
            print(f"round {number + 1} of {options.rounds}: {seconds:.0f} s", file=sys.stderr, flush=True)
    rows = show(times)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
