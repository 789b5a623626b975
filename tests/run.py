"""Run the tests. The log ends with a line for each run, the slowest tests, the failed tests, and `N passed, N failed`.

    python -m tests.run [--part quick|core|rest|all] [--stages lint,unit,lab,mpi] [--ranks 1,2,3] [--python PYTHON]...
                        [PYTEST WORDS]

PYTEST WORDS are arguments for pytest: files and folders of tests, `-k`, `-x`. If they name files, a line is printed for
each test. With a single run, such as `--stages unit` or `--stages mpi --ranks 2`, the line is printed when the test
ends.

The exit code is 1 if a test or check has failed, and 2 if the arguments are wrong. `--python` names the interpreters
for the MPI tests, one for each MPI. `--beside COMMAND` runs a command at the same time as the checks. It must have
succeeded before MPI tests begin: `make test` makes its second environment in this way.

The parts are:

- `quick` (`make test-quick`): those tests of `core` that need no MPI, and those of the calls that users need most.
- `core` (`make test`): tests without a mark.
- `rest` (`make test-rest`): tests marked `slow` and, on `MANY` ranks and more, also tests without a mark. Core and rest
  together run each test that is not marked `full`.
- `all` (`make test-all`): the same tests, and those marked `full`.

In `core` and `rest` the interpreters take turns: Open MPI runs the tests on 1, 3 and 7 ranks, and MPICH those on 2 and
4. Each MPI closes, fails and starts jobs in its own way. So both get tests of faults and interrupts (Open MPI on 3
ranks, MPICH on 2 and 4), and of results on odd and even numbers of ranks. Most tests on 1 rank start jobs by `mpips
run`. They run with Open MPI, whose mpirun leaves more work to `mpips run`. In `all` every number of ranks runs under
every interpreter. There is one exception: on `MANY` ranks and more, tests marked `either_mpi` (`tests/mpi/sizes.py`)
still run under one interpreter.

Runs that need one core run two at a time. Tests on several ranks run alone. There is a hard time limit for each run
(`--limit`), and for all runs together (`--total`). The output of rank 0 is printed, that of other ranks only if they
fail. `--record FILE` appends the results to a file, and `python -m tests.report FILE` prints their sums, as continuous
integration does.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple

from launch import NAMES, Job, LauncherError, build, find, this_machine
from tests import child
from tests.report import TAIL, Result, counted, record, show, summarise, unfinished
from tests.tracked import untracked

STAGES = ("lint", "unit", "lab", "mpi")
ROOT = Path(__file__).resolve().parent.parent
# lines of output to repeat at the end of the log, for a run that has not finished
LAST_LINES = 6
# from this number of ranks on, tests marked `either_mpi` run under one MPI only
MANY = 4
# the environment variable that tells tests that another MPI runs those marked `either_mpi`
OTHER_MPI = "TESTS_OTHER_MPI"
CORE, SLOW, ALL = "not slow and not full and not huge", "slow and not full and not huge", "not huge"
REST = "not full and not huge"
QUICK = (
    "collectives/test_results.py",
    "collectives/test_plans.py",
    "collectives/test_grouped.py",
    "collectives/test_tensor.py",
    "mpips/test_store_*.py",
    "mpips/test_tables.py",
    "mpips/training/test_fit.py",
    "mpips/training/test_rows.py",
)


class Choice(NamedTuple):
    """The tests to run."""

    # the caller's arguments for pytest
    words: tuple[str, ...] = ()
    part: str = "core"

    @property
    def named(self) -> bool:
        """True if the arguments name files of tests."""
        return any(word.startswith("tests") and (ROOT / word.partition("::")[0]).exists() for word in self.words)

    def of(self, *places: str, new: bool = False) -> list[str]:
        """Return the arguments for pytest. `places` are used if the caller has named no files.

        With `new`, the part `core` runs none of these tests, so the part `rest` runs also those without a mark.
        """
        marks = {"quick": CORE, "core": CORE, "rest": REST if new else SLOW, "all": ALL}[self.part]
        return ["-m", marks, *self.words, *(() if self.named else places)]

    def only(self, words: Sequence[str]) -> Choice:
        """Return a choice with further arguments for pytest, such as the places of tests."""
        return self._replace(words=(*self.words, *words))


Task = Callable[[IO[bytes] | None], Result]


class Relayed(BytesIO):
    """A stream that passes on what is written to it to `out`, and keeps the last `TAIL` bytes."""

    def __init__(self, out: IO[bytes]) -> None:
        super().__init__()
        self._out, self.tail = out, b""

    def write(self, text: bytes) -> int:  # type: ignore[override]
        self._out.write(text)
        self._out.flush()
        self.tail = (self.tail + text)[-TAIL:]
        return len(text)


class Limits:
    """The time limits: `each` is the number of seconds for a run, `total` that for all runs together."""

    def __init__(self, each: float, total: float) -> None:
        self.each, self.total, self._start = each, total, time.monotonic()

    def now(self) -> float:
        return max(1.0, min(self.each, self._start + self.total - time.monotonic()))


def main() -> int:
    """Run the command line, and return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # Under nohup, or in a shell without job control, a signal may be ignored. Tests would inherit that, but they do
        # not inherit handlers. So ignore the signal by a handler.
        signal.signal(number, ignore if signal.getsignal(number) is signal.SIG_IGN else stop)
    parser = argparse.ArgumentParser(
        description="Run the tests.", epilog="All other words go to pytest: files and folders of tests, -k, -x."
    )
    parser.add_argument("--stages", type=names, default="lint,unit,lab,mpi")
    parser.add_argument("--part", choices=["quick", "core", "rest", "all"], default="core", help="which tests")
    parser.add_argument("--ranks", type=numbers, default="1,2,3")
    parser.add_argument("--python", action="append", help="interpreter for MPI tests; may be repeated")
    parser.add_argument("--beside", default="", help="a command to run beside the checkers")
    parser.add_argument("--limit", type=float, default=900, help="seconds that one run may take")
    parser.add_argument("--total", type=float, default=4800, help="seconds that all runs together may take")
    parser.add_argument("--record", type=Path, help="a file to which the results are added, as a line of JSON")
    arguments, words = parser.parse_known_args()
    begun = time.monotonic()
    limits, stages = Limits(arguments.limit, arguments.total), arguments.stages
    choice = Choice(tuple(words), arguments.part)
    if choice.named:
        # Print a line for each test.
        choice = choice.only(["-vv"])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        compile_once(folder)
        results = together(checks(stages, arguments.beside, choice, limits))
        if "mpi" in stages:
            results += mpi(arguments.python or [sys.executable], arguments.ranks, choice, limits)
    summarise(results)
    if arguments.record:
        record(arguments.record, arguments.part, time.monotonic() - begun, results)
    if not any(result.passed or result.failed for result in results):
        print("no test has run: look at the words and folders that were given")
        return 1
    return 1 if any(result.failed for result in results) else 0


def names(text: str) -> list[str]:
    """Parse the value of `--stages`."""
    stages = text.split(",")
    if not set(stages) <= set(STAGES):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(STAGES)}")
    return stages


def numbers(text: str) -> list[int]:
    """Parse the value of `--ranks`."""
    counts = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if 0 in counts:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of ranks from 1 on, such as 1,2,4")
    return counts


def compile_once(folder: str) -> None:
    """If Python may not write bytecode next to the sources, let it write to `folder`. Then ranks need not compile."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", folder)


def ignore(number: int, frame: object) -> None:
    """Handle a signal by doing nothing."""


def stop(number: int, frame: object) -> None:
    """Handle a signal: end all runs, and exit."""
    child.stop()
    sys.exit(f"ended by {signal.Signals(number).name}")


def checks(stages: Sequence[str], beside: str, choice: Choice, limits: Limits) -> list[Task]:
    """Return the runs that need one core: the `--beside` command, checks, unit and lab tests. Long ones come first."""
    tasks: list[Task] = []
    if beside:
        tasks.append(lambda out: tool("environment", shlex.split(beside), limits, out))
    for stage in ("lab", "unit"):
        if stage in stages:
            for name, places in parts(stage, choice).items():
                tasks.append(lambda out, name=name, places=places: alone(name, choice.only(places), limits, out))  # type: ignore[misc]
    if "lint" in stages:
        tasks.append(lambda out: tool("mypy", [sys.executable, "-m", "mypy"], limits, out))
        tasks.append(lambda out: tool("ruff", ruff("check"), limits, out))
        tasks.append(lambda out: tool("ruff format", ruff("format", "--check"), limits, out))
    return tasks


def ruff(*words: str) -> list[str]:
    """Return a command of ruff for the files that git tracks. Other files in the clone are not ours."""
    outside = [f"--extend-exclude={path}" for path in untracked(ROOT)]
    return [sys.executable, "-m", "ruff", *words, *outside, "."]


def parts(stage: str, choice: Choice) -> dict[str, list[str]]:
    """Return the runs of a stage that can run at the same time: name -> places of tests.

    There is a run for each folder. The largest come first: a long run that begins last would run alone at the end.
    """
    folder = ROOT / "tests" / stage
    if choice.named:
        return {stage: []}
    inner = [path for path in folder.iterdir() if (path / "__init__.py").is_file()]
    inner.sort(key=lambda path: sum(file.stat().st_size for file in path.rglob("*.py")), reverse=True)
    files = sorted(str(path.relative_to(ROOT)) for path in folder.glob("test_*.py"))
    runs = {f"{stage} {path.name}": [str(path.relative_to(ROOT))] for path in inner}
    return runs | ({stage: files} if files else {})


def mpi(pythons: Sequence[str], counts: Sequence[int], choice: Choice, limits: Limits) -> list[Result]:
    """Run the MPI tests: first those on one rank, two runs at a time, then the others one after another."""
    results = [Result(python, 0, 1, failures=("there is no such Python",)) for python in pythons if not usable(python)]
    pythons = [python for python in pythons if usable(python)]
    every = [(python, count) for python in pythons for count in counts]
    runs = [(python, count) for python, count in every if choice.part == "all" or turn(python, count, pythons, counts)]
    tasks: list[Task] = [
        lambda out, python=python, name=name, places=places: ranks(  # type: ignore[misc]
            python, 1, choice.only(places), limits, out, part=name
        )
        for python, count in runs
        for name, places in parts("mpi", choice).items()
        if count == 1
    ]
    results += together(tasks)
    many = [count for count in counts if count >= MANY]
    for python, count in runs:
        if count > 1:
            elsewhere = count in many and not turn(python, count, pythons, many)
            results.append(ranks(python, count, choice, limits, environment={OTHER_MPI: "1"} if elsewhere else {}))
    flavours = {find(python=python).flavour for python in pythons}
    if len(flavours) < len(pythons):
        print(f"every environment has the same MPI ({NAMES[flavours.pop()]}): `make test MPI=openmpi` tests both")
    return results


def mpi_places(part: str) -> list[str]:
    """Return the files or folders of the MPI tests of a part."""
    folder = ROOT / "tests" / "mpi"
    if part != "quick":
        return [str(folder.relative_to(ROOT))]
    return [str(path.relative_to(ROOT)) for name in QUICK for path in sorted(folder.glob(name))]


def turn(python: str, count: int, pythons: Sequence[str], counts: Sequence[int]) -> bool:
    """True if this interpreter runs the tests on `count` ranks. The interpreters take turns over `counts`."""
    return pythons[counts.index(count) % len(pythons)] == python


def usable(python: str) -> bool:
    try:
        return Path(python).exists() and bool(find(python=python))
    except LauncherError as error:
        print(f"{python}: {error}", flush=True)
        return False


def together(tasks: Sequence[Task]) -> list[Result]:
    """Run tasks that need one core each, two at a time. The output of several tasks is printed when each ends."""
    if len(tasks) < 2:
        return [task(None) for task in tasks]

    def whole(task: Task) -> Result:
        out = BytesIO()
        try:
            return task(out)
        finally:
            child.show(out.getvalue())

    with ThreadPoolExecutor(min(2, this_machine().cores)) as pool:
        return list(pool.map(whole, tasks))


def tool(name: str, argv: list[str], limits: Limits, out: IO[bytes] | None = None) -> Result:
    """Run a check such as mypy. It counts as one test."""
    started = time.monotonic()
    title(name, out)
    code = child.run(argv, limits.now(), ROOT, out)
    failures = (f"{shlex.join(argv)}: exit code {code}",) if code else ()
    return Result(name, int(not code), int(bool(code)), 0, time.monotonic() - started, failures)


def alone(name: str, choice: Choice, limits: Limits, out: IO[bytes] | None = None) -> Result:
    """Run tests in one process: unit tests, which need no MPI, or lab tests, which start jobs themselves."""
    title(f"{name} tests", out)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "0.xml")
        argv = [sys.executable, "-m", "pytest", "-q", "--color=no", f"--junitxml={report}"]
        code = child.run([*argv, *choice.of(new=name == "lab")], limits.now(), ROOT, out)
        return counted(name, report, code, time.monotonic() - started)


def ranks(
    python: str,
    count: int,
    choice: Choice,
    limits: Limits,
    out: IO[bytes] | None = None,
    environment: Mapping[str, str] = {},
    part: str = "",
) -> Result:
    """Run the MPI tests on `count` ranks of an interpreter, under the mpirun that belongs to it.

    Args:
        python: The interpreter.
        count: The number of ranks.
        choice: The tests.
        limits: The time limits.
        out: Where to write the output; None: standard output.
        environment: Further environment variables of the ranks.
        part: The name of the part to show in the log, or "".
    """
    launcher = find(python=python)
    name = f"{NAMES[launcher.flavour]}, {count} rank{'s' if count > 1 else ''}" + (f", {part}" if part else "")
    title(name, out)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        limit = limits.now()
        words = choice.of(*mpi_places(choice.part), new=count >= MANY)
        program = (python, "-m", "tests.rank", folder, str(limit), *words)
        job = Job(count, program, {"OMP_NUM_THREADS": "1", **environment})
        output = Relayed(out or sys.stdout.buffer)
        code = child.run(build(launcher, job, this_machine()), limit, ROOT, output)
        result = counted(name, Path(folder, "0.xml"), code, time.monotonic() - started)
        where = unfinished(Path(folder))
        if where and not result.failed:
            result = result._replace(failed=1)
        if result.failed:
            show(Path(folder), out)
        last = [line for line in output.tail.decode(errors="replace").splitlines() if line.strip("=- ")][-LAST_LINES:]
        return result._replace(failures=(*result.failures, *where, *(f"  {line}" for line in last if where)))


def title(name: str, out: IO[bytes] | None) -> None:
    child.show(f"\n== {name}\n".encode(), out)


if __name__ == "__main__":
    sys.exit(main())
