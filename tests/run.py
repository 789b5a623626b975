"""Runs the tests. The log ends with a line a run, the slowest tests, the failed tests, and `N passed, N failed`.

    python -m tests.run [--part quick|core|rest|all] [--stages lint,unit,lab,mpi] [--ranks 1,2,3] [--python PYTHON]...
                        [PYTEST WORDS]

PYTEST WORDS go to pytest: files and folders of tests, `-k`, `-x`. Where they name files, a line is printed for each
test: as it ends if there is one run, such as `--stages unit` or `--stages mpi --ranks 2`.

The exit code is 1 if anything failed, 2 if these words mean nothing. `--python` names the interpreters under which the
MPI tests run, one for each MPI. `--beside COMMAND` runs beside the checkers and must have succeeded before MPI tests
begin (`make test` makes its second environment so).

Which tests a part has:

- `quick` (`make test-quick`): of `core` what needs no MPI, and what users call most.
- `core` (`make test`): those without a mark.
- `rest` (`make test-rest`): those marked `slow`, and on MANY ranks and more also those without a mark. Core and rest
  together run each test that is not marked `full`.
- `all` (`make test-all`): those and the ones marked `full`.

In `core` and `rest` each number of ranks runs under one of the interpreters, in turn: Open MPI on 1, 3 and 7 ranks and
MPICH on 2 and 4. Each MPI closes, fails and starts jobs in its own way, so each gets faults and interrupts (Open MPI on
3 ranks, MPICH on 2 and 4) and results on odd and even nodes. Most tests that start jobs, on 1 rank, are of `mpips run`,
and Open MPI's mpirun leaves more to it. In `all` every number of ranks runs under every interpreter; only tests marked
`either_mpi` (`tests/mpi/sizes.py`) still run under one of them, in turn, on MANY ranks and more.

What needs one core runs two at a time; tests on several ranks run alone. Every run has a hard time limit (`--limit`),
and so have all together (`--total`). Rank 0 prints; other ranks' output is shown if they fail. `--record FILE` adds the
results to a file, of which `python -m tests.report FILE` prints the sums, as continuous integration does.
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
LAST_LINES = 6  # of the output of a run that did not come to its end, below all else
MANY = 4  # ranks
OTHER_MPI = "TESTS_OTHER_MPI"  # in the environment of tests on so many ranks of which another MPI runs some
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
    """Which tests to run: the caller's words for pytest, and the part."""

    words: tuple[str, ...] = ()
    part: str = "core"

    @property
    def named(self) -> bool:
        """Whether the words name files."""
        return any(word.startswith("tests") and (ROOT / word.partition("::")[0]).exists() for word in self.words)

    def of(self, *places: str, new: bool = False) -> list[str]:
        """Words for pytest, of which the last -m counts; these places where the caller names none. `new`: where the
        core runs no test."""
        marks = {"quick": CORE, "core": CORE, "rest": REST if new else SLOW, "all": ALL}[self.part]
        return ["-m", marks, *self.words, *(() if self.named else places)]

    def only(self, words: Sequence[str]) -> Choice:
        """The same tests in these places alone, or with these words more."""
        return self._replace(words=(*self.words, *words))


Task = Callable[[IO[bytes] | None], Result]


class Relayed(BytesIO):
    """Passes on to `out` what is written to it, and keeps the end of it."""

    def __init__(self, out: IO[bytes]) -> None:
        super().__init__()
        self._out, self.tail = out, b""

    def write(self, text: bytes) -> int:  # type: ignore[override]
        self._out.write(text)
        self._out.flush()
        self.tail = (self.tail + text)[-TAIL:]
        return len(text)


class Limits:
    """How long a run may take: `each` seconds, and no longer than what is left of `total` for all."""

    def __init__(self, each: float, total: float) -> None:
        self.each, self.total, self._start = each, total, time.monotonic()

    def now(self) -> float:
        return max(1.0, min(self.each, self._start + self.total - time.monotonic()))


def main() -> int:
    """Command line; returns the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        # What nohup, or a shell without job control, has us ignore is ignored by a handler: tests inherit none.
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
        choice = choice.only(["-vv"])  # a line for each test
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
    """The stages of `--stages`."""
    found = text.split(",")
    if not set(found) <= set(STAGES):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(STAGES)}")
    return found


def numbers(text: str) -> list[int]:
    """The numbers of ranks of `--ranks`."""
    found = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if 0 in found:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of ranks from 1 on, such as 1,2,4")
    return found


def compile_once(folder: str) -> None:
    """Where no bytecode is to lie beside the sources it lies in `folder`, or every rank would compile them again."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", folder)


def ignore(number: int, frame: object) -> None:
    """Hears a signal, and goes on."""


def stop(number: int, frame: object) -> None:
    """Ends what was started."""
    child.stop()
    sys.exit(f"ended by {signal.Signals(number).name}")


def checks(stages: Sequence[str], beside: str, choice: Choice, limits: Limits) -> list[Task]:
    """What needs no second core: the environment to be made, checkers, unit and lab tests. The longest come first."""
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
    """A command of ruff over the project's own files: a program that somebody tries out in the clone is not ours."""
    outside = [f"--extend-exclude={path}" for path in untracked(ROOT)]
    return [sys.executable, "-m", "ruff", *words, *outside, "."]


def parts(stage: str, choice: Choice) -> dict[str, list[str]]:
    """The runs of a stage that go side by side, a folder each, and the places of their tests. The largest come first:
    one that begins last is waited for alone."""
    folder = ROOT / "tests" / stage
    if choice.named:
        return {stage: []}
    inner = [path for path in folder.iterdir() if (path / "__init__.py").is_file()]
    inner.sort(key=lambda path: sum(file.stat().st_size for file in path.rglob("*.py")), reverse=True)
    files = sorted(str(path.relative_to(ROOT)) for path in folder.glob("test_*.py"))
    runs = {f"{stage} {path.name}": [str(path.relative_to(ROOT))] for path in inner}
    return runs | ({stage: files} if files else {})


def mpi(pythons: Sequence[str], counts: Sequence[int], choice: Choice, limits: Limits) -> list[Result]:
    """The MPI tests under each interpreter: those on one rank in parts side by side, then one run after the other."""
    results = [Result(python, 0, 1, failures=("there is no such Python",)) for python in pythons if not usable(python)]
    pythons = [python for python in pythons if usable(python)]
    every = [(python, count) for python in pythons for count in counts]
    runs = [(python, count) for python, count in every if choice.part == "all" or turn(python, count, pythons, counts)]
    one: list[Task] = [
        lambda out, python=python, name=name, places=places: ranks(  # type: ignore[misc]
            python, 1, choice.only(places), limits, out, part=name
        )
        for python, count in runs
        for name, places in parts("mpi", choice).items()
        if count == 1
    ]
    results += together(one)
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
    """The files or folders of the MPI tests of a part."""
    folder = ROOT / "tests" / "mpi"
    if part != "quick":
        return [str(folder.relative_to(ROOT))]
    return [str(path.relative_to(ROOT)) for name in QUICK for path in sorted(folder.glob(name))]


def turn(python: str, count: int, pythons: Sequence[str], counts: Sequence[int]) -> bool:
    """Whether it is this interpreter's turn where each of these numbers of ranks has one."""
    return pythons[counts.index(count) % len(pythons)] == python


def usable(python: str) -> bool:
    try:
        return Path(python).exists() and bool(find(python=python))
    except LauncherError as error:
        print(f"{python}: {error}", flush=True)
        return False


def together(tasks: Sequence[Task]) -> list[Result]:
    """Runs tasks of one process each, two at a time on two cores; several show their output as they end."""
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
    """A checker, as one test."""
    started = time.monotonic()
    title(name, out)
    code = child.run(argv, limits.now(), ROOT, out)
    failures = (f"{shlex.join(argv)}: exit code {code}",) if code else ()
    return Result(name, int(not code), int(bool(code)), 0, time.monotonic() - started, failures)


def alone(name: str, choice: Choice, limits: Limits, out: IO[bytes] | None = None) -> Result:
    """Tests in one process: unit tests need no MPI, lab tests start it themselves."""
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
    """The MPI tests on `count` ranks of `python`, under the mpirun that belongs to it."""
    launcher = find(python=python)
    name = f"{NAMES[launcher.flavour]}, {count} rank{'s' if count > 1 else ''}" + (f", {part}" if part else "")
    title(name, out)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        limit = limits.now()
        words = choice.of(*mpi_places(choice.part), new=count >= MANY)
        program = (python, "-m", "tests.rank", folder, str(limit), *words)
        job = Job(count, program, {"OMP_NUM_THREADS": "1", **environment})
        said = Relayed(out or sys.stdout.buffer)
        code = child.run(build(launcher, job, this_machine()), limit, ROOT, said)
        result = counted(name, Path(folder, "0.xml"), code, time.monotonic() - started)
        where = unfinished(Path(folder))
        if where and not result.failed:
            result = result._replace(failed=1)
        if result.failed:
            show(Path(folder), out)
        last = [line for line in said.tail.decode(errors="replace").splitlines() if line.strip("=- ")][-LAST_LINES:]
        return result._replace(failures=(*result.failures, *where, *(f"  {line}" for line in last if where)))


def title(name: str, out: IO[bytes] | None) -> None:
    child.show(f"\n== {name}\n".encode(), out)


if __name__ == "__main__":
    sys.exit(main())
