"""Compares push + pull of the store with MXNet 1.9.1's dist_sync, in one run, in turns.

    python -m examples.reproduce.store.beside_mxnet [--rounds 3] [--environment FOLDER] [--json FILE]

The program makes an environment for MXNet (numpy 1.23.5, mxnet 1.9.1, from the package registry) unless it exists.
For each setting it starts MXNet and mpips jobs in turn, several times, and compares medians of medians. If MXNet cannot
be installed, it says why and exits with code 0.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import click
from rich.table import Table

from collectives.machine import choose_long_copies, fix_addresses
from collectives.terminal import Interruptible, OutFile, console, show_progress, show_table, write_text

SIZES = (1024, 262_144, 4_194_304, 67_108_864)
MXNET_REPEATS = (400, 200, 40, 8)
# (servers, workers)
SETTINGS = ((1, 2), (2, 4))
PACKAGES = ("numpy==1.23.5", "mxnet==1.9.1")
# seconds of a job
LIMIT = 120
WORKER = Path(__file__).with_name("mxnet_worker.py")
# prefixes of environment variables that a job must not inherit
JOB_VARIABLES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDRA_", "MPI_", "MPIPS_")


def environment(folder: Path) -> tuple[Path | None, str]:
    """Return the Python with MXNet, after making it in `folder` if needed; or None and the reason."""
    python = folder / "bin" / "python"
    if not python.exists():
        found = next((path for minor in (11, 10, 9, 8) if (path := shutil.which(f"python3.{minor}"))), None)
        if found is None:
            return None, "MXNet 1.9.1 needs Python 3.8 to 3.11, and none is on the PATH"
        if folder.exists():
            return None, f"{folder} is there and is no environment: name another folder with --environment"
        if reason := _make(folder, found):
            return None, reason
    probe = subprocess.run([str(python), "-c", "import mxnet"], capture_output=True, text=True, check=False)
    if probe.returncode:
        why = probe.stderr.strip().splitlines()[-1:]
        return None, f"{python} cannot import mxnet: {why}; remove {folder} and it is made anew"
    return python, ""


def _make(folder: Path, found: str) -> str:
    """Make the environment beside `folder`, and move it there when it is complete. Return an error message, or ""."""
    part = folder.with_name(f"{folder.name}.part")
    # An interrupted run may have left it.
    shutil.rmtree(part, ignore_errors=True)
    click.echo(f"installing {' and '.join(PACKAGES)} into {folder}", err=True)
    pip = [str(part / "bin" / "python"), "-m", "pip", "install", "-q", *PACKAGES]
    for command in ([found, "-m", "venv", str(part)], pip):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(part, ignore_errors=True)
            return f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}"
    part.rename(folder)
    return ""


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith((*JOB_VARIABLES, "DMLC_"))}


def mxnet(python: Path, servers: int, workers: int) -> dict[int, float]:
    """Run an MXNet job, and return size -> median seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **_clean(),
        **choose_long_copies(os.environ),
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_SERVER": str(servers),
        "DMLC_NUM_WORKER": str(workers),
        "OMP_NUM_THREADS": "1",
    }
    words = [*fix_addresses(), str(python), str(WORKER), ",".join(map(str, SIZES)), ",".join(map(str, MXNET_REPEATS))]
    roles = ["scheduler"] + ["server"] * servers + ["worker"] * workers
    processes = [
        subprocess.Popen(words, env={**env, "DMLC_ROLE": role}, stdout=subprocess.PIPE, text=True) for role in roles
    ]
    try:
        texts = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    results = json.loads(next(text for text in texts if text.strip()))
    return {result["bytes"]: statistics.median(result["seconds"]) for result in results}


def ours(servers: int, workers: int) -> list[dict[str, float]]:
    """Run an mpips job, and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "launch.run",
            "--servers",
            str(servers),
            "--workers",
            str(workers),
            "-m",
            "mpips.bench.kvstore",
            "--servers",
            str(servers),
            "--seconds",
            "0.6",
            "--sizes",
            ",".join(map(str, SIZES)),
            "--json",
            str(path),
        ]
        done = subprocess.run(command, env=_clean(), capture_output=True, text=True, timeout=LIMIT, check=False)
        if done.returncode:
            raise click.ClickException(f"the mpips job failed:\n{done.stdout}{done.stderr}")
        rows: list[dict[str, float]] = json.loads(path.read_text())
        return rows


@click.command(cls=Interruptible)
@click.option("--rounds", default=3, show_default=True, help="jobs of each side and setting, alternating")
@click.option("--environment", "folder", default="out/mxnet", show_default=True, type=click.Path(path_type=Path))
@click.option("--json", "json_path", type=OutFile(), help="write the rows as JSON")
def command(rounds: int, folder: Path, json_path: Path | None) -> None:
    """Push + pull of one key beside MXNet 1.9.1's dist_sync."""
    screen = console()
    python, reason = environment(folder)
    if python is None:
        screen.print(f"skipped: {reason}")
        return
    results = []
    with show_progress("jobs", 2 * rounds * len(SETTINGS)) as begin:
        for servers, workers in SETTINGS:
            theirs: dict[int, list[float]] = defaultdict(list)
            mine: dict[tuple[int, str], list[float]] = defaultdict(list)
            floors: dict[tuple[int, str], list[float]] = defaultdict(list)
            for _ in range(rounds):
                begin(f"MXNet, servers {servers}, workers {workers}")
                for size, seconds in mxnet(python, servers, workers).items():
                    theirs[size].append(seconds)
                begin(f"mpips, servers {servers}, workers {workers}")
                for row in ours(servers, workers):
                    case = int(row["bytes"]), str(row["array"])
                    mine[case].append(row["push_pull_s"])
                    floors[case].append(row["floor_s"])
            for (size, array), times in mine.items():
                their, our = statistics.median(theirs[size]), statistics.median(times)
                results.append(
                    {
                        "servers": servers,
                        "workers": workers,
                        "bytes": size,
                        "array": array,
                        "mxnet_s": their,
                        "mpips_s": our,
                        "times_faster": their / our,
                        "over_floor": our / statistics.median(floors[size, array]),
                    }
                )
    show_table(table(results), screen)
    if json_path:
        write_text(json_path, json.dumps(results, indent=1))


def table(results: list[dict]) -> Table:
    """Build the table of the comparison, in microseconds."""
    view = Table(title="dist_sync push + pull of one key, median us on worker 0")
    for column in ("servers", "workers", "bytes", "arrays", "MXNet 1.9.1", "mpips", "times faster", "over the floor"):
        view.add_column(column, justify="left" if column == "arrays" else "right")
    for r in results:
        view.add_row(
            str(r["servers"]),
            str(r["workers"]),
            f"{r['bytes']:,}",
            r["array"],
            f"{1e6 * r['mxnet_s']:,.0f}",
            f"{1e6 * r['mpips_s']:,.1f}",
            f"{r['times_faster']:.1f}",
            f"{r['over_floor']:.2f}",
        )
    return view


if __name__ == "__main__":
    command()
