"""What compiled kernels cost a job that starts: without them, without a cache, with one, with a read-only one.

    python -m examples.reproduce.store.starts

First, what Numba and five kernels add to a process. Then jobs of `mpips run`: `create`, an optimizer, steps of push and
pull.
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

LIMIT = 120  # seconds for one job
LAYOUTS = ((1, 1), (4, 4))
KEYS = {"small": 16_384, "large": 1_000_000}


class Case(NamedTuple):
    """What a job finds: kernels or none, and whether it may keep them. `engine`: MPIPS_KERNELS, "" where unset."""

    name: str
    engine: str
    full: bool
    writable: bool


CASES = (
    Case("NumPy", "numpy", False, True),
    Case("once it pays", "", True, True),
    Case("no kernels yet", "numba", False, True),
    Case("kernels there", "numba", True, True),
    Case("there, read-only", "numba", True, False),
    Case("none, read-only", "numba", False, False),
)


def job(steps: int) -> None:
    """Run one rank; worker 0 prints what it took as JSON."""
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
    """Load five kernels of optimizers; print what that adds to this process as JSON."""
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
    engine.settle(LIMIT)
    print(json.dumps({name: value - before[name] for name, value in look().items()}))


def measure(case: Case, layout: tuple[int, int], steps: int, cache: Path) -> dict[str, Any] | None:
    """Run a job; return what worker 0 says and the seconds of all, None where nothing can be made read-only here."""
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
        if case.engine == "numba" and case.writable:
            shutil.copytree(folder, cache, dirs_exist_ok=True)
    said = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    return {**json.loads(said), "whole": whole}


def read_only(folder: Path) -> list[str] | None:
    """Return words of a command in which a folder cannot be written to: root needs a mount of its own for that."""
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
