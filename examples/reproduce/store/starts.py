"""Measures what compiled kernels cost at the start of a job: without kernels, and with and without a cache of them.

    python -m examples.reproduce.store.starts

The first lines show what Numba and five kernels add to a process. The table has the times of jobs of `mpips run`:
`create`, setting an optimizer, and steps of push and pull.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

# seconds of a job
LIMIT = 120
LAYOUTS = ((1, 1), (4, 4))
KEYS = {"small": 16_384, "large": 1_000_000}


class Case(NamedTuple):
    """The kernels and the cache that a job finds."""

    name: str
    # MPIPS_KERNELS; "" if not set
    engine: str
    # True if the cache holds the kernels already
    full: bool
    # True if the job may write to the cache
    writable: bool


CASES = (
    Case("NumPy", "numpy", False, True),
    Case("no kernels yet", "", False, True),
    Case("kernels there", "", True, True),
    Case("there, read-only", "", True, False),
    Case("none, read-only", "", False, False),
)


def job(steps: int) -> None:
    """Run as a rank of a job. Worker 0 prints its times as JSON."""
    begun = time.perf_counter()
    import mpips

    kv = mpips.create("dist_sync")
    created = time.perf_counter()
    arrays = {key: np.ones(elements, np.float32) for key, elements in KEYS.items()}
    names, values = list(arrays), list(arrays.values())
    for key in names:
        kv.init(key, arrays[key])
    kv.set_optimizer("adam", learning_rate=1e-3)
    ends = [time.perf_counter()]
    for _ in range(steps):
        kv.pushpull(names, values, out=values)
        ends.append(time.perf_counter())
    took = np.diff(ends)
    if kv.rank == 0:
        print(
            json.dumps(
                {
                    "create": created - begun,
                    "optimizer": ends[0] - created,
                    "first": took[0],
                    "longest": took.max(),
                    "steps": ends[-1] - ends[0],
                }
            ),
            flush=True,
        )
    kv.close()


def load() -> None:
    """Load the kernels of five optimizers, and print as JSON what this adds to the process."""
    from collectives.kernels import engine
    from mpips import optimizers

    def look() -> dict[str, float]:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        kib = {name: int(size.split()[0]) for name, size in (line.split(":") for line in lines)}
        return {"MiB": kib["Rss"] / 1024, "own MiB": kib["Private_Dirty"] / 1024, "core s": time.process_time()}

    before = look()
    for optimizer in (
        optimizers.SGD(),
        optimizers.SGD(momentum=0.9),
        optimizers.Adam(),
        optimizers.AdaGrad(),
        optimizers.RMSProp(),
    ):
        optimizer.prepare(np.dtype(np.float32))
    engine.load_all()
    print(json.dumps({name: value - before[name] for name, value in look().items()}))


def measure(case: Case, layout: tuple[int, int], steps: int, cache: Path) -> dict[str, Any] | None:
    """Run a job. Return the times that worker 0 printed, and "whole", the seconds of the job.

    Return None if the case needs a read-only folder and this machine cannot make one.

    Args:
        layout: (workers, servers).
        cache: A folder with kernels, which fills a job's cache and collects what a job compiles.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "kernels")
        shutil.copytree(cache, folder) if case.full else folder.mkdir(mode=0o700)
        words = [] if case.writable else read_only(folder)
        if words is None:
            return None
        workers, servers = layout
        words += [sys.executable, "-m", "launch.cli", "run", "-w", str(workers), "-s", str(servers)]
        words += ["-m", __spec__.name, "--job", "--steps", str(steps)]
        variables = {"MPIPS_KERNELS": case.engine, "MPIPS_KERNELS_FOLDER": str(folder)}
        begun = time.perf_counter()
        done = subprocess.run(
            words, env=os.environ | variables, capture_output=True, text=True, timeout=LIMIT, check=True
        )
        whole = time.perf_counter() - begun
        if case.engine != "numpy" and case.writable:
            shutil.copytree(folder, cache, dirs_exist_ok=True)
    said = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return {**json.loads(said), "whole": whole}


def read_only(folder: Path) -> list[str] | None:
    """Make a folder read-only. Return the words to put before a command, or None if it cannot be done.

    Root can write to any folder, so its command runs in a mount namespace in which the folder is mounted read-only.
    """
    if os.getuid():
        folder.chmod(0o500)
        return []
    mount = f'mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    able = shutil.which("unshare") and not subprocess.run([*words, "true"], capture_output=True).returncode
    return words if able else None


@click.command()
@click.option("--job", "in_job", is_flag=True, help="Be a rank of one job.")
@click.option("--load", "in_load", is_flag=True, help="Load kernels.")
@click.option("--steps", default=100, show_default=True, type=click.IntRange(8))
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Jobs of each case; the median.")
def main(in_job: bool, in_load: bool, steps: int, repeats: int) -> None:
    """Time the starts of jobs."""
    if in_job:
        job(steps)
        return
    if in_load:
        load()
        return
    columns = {
        "create": "create, s",
        "optimizer": "init, set_optimizer, s",
        "first": "first step, s",
        "longest": "longest step, s",
        "steps": f"{steps} steps, s",
        "whole": "whole job, s",
    }
    console = Console(width=160)
    with tempfile.TemporaryDirectory() as cache:
        for name in ("no kernels yet", "kernels there"):
            variables = os.environ | {"MPIPS_KERNELS_FOLDER": cache}
            command = [sys.executable, "-m", __spec__.name, "--load"]
            said = subprocess.run(command, env=variables, stdout=subprocess.PIPE, timeout=LIMIT, check=True).stdout
            console.print(name, *(f"{value:.2f} {unit}" for unit, value in json.loads(said).items()), sep=", ")
    table = Table("workers", "servers", "kernels", *columns.values())
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as temporary:
            cache = Path(temporary, "cache")
            cache.mkdir(mode=0o700)
            for case in CASES:
                found = [measure(case, layout, steps, cache) for _ in range(repeats)]
                runs = [run for run in found if run is not None]
                shown = [f"{np.median([run[name] for run in runs]):.3g}" if runs else "-" for name in columns]
                table.add_row(*map(str, layout), case.name, *shown)
                console.print(*layout, case.name, *shown, sep="  ")
    console.print(table)


if __name__ == "__main__":
    main()
