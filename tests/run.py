"""Runs all tests and ends with one line, `N passed, N failed`; the exit code is 1 if anything failed.

    python -m tests.run [--stages lint,unit,lab,mpi] [--ranks 1,2,3,4,5,7] [--python PYTHON]... [PYTEST WORDS]

`--python` names the interpreters under which the MPI tests run, one a flavour of MPI; `--beside COMMAND` is run beside
lint and unit tests and must have succeeded before MPI tests begin (`make test` makes its second environment so). Every
run has a hard time limit. Rank 0 prints; what the other ranks print is shown if their run fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from launch.command import NAMES, Job, build, find, this_machine

ROOT = Path(__file__).resolve().parent.parent
TAIL = 6000  # characters of a failing rank's output that are shown


class Result(NamedTuple):
    """One run: what it was, its tests, and its seconds."""

    name: str
    passed: int
    failed: int
    skipped: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.name:24} {self.passed} passed, {self.failed} failed, {self.skipped} skipped, {self.seconds:.0f} s"
        )


def main() -> int:
    """Command line; returns the exit code."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that `run` ends what it started
    parser = argparse.ArgumentParser(description="Run the tests.")
    parser.add_argument("--stages", default="lint,unit,lab,mpi")
    parser.add_argument("--ranks", default="1,2,3,4,5,7")
    parser.add_argument("--python", action="append", help="interpreter for MPI tests; may be repeated")
    parser.add_argument("--beside", default="", help="a command to run beside lint and unit tests")
    parser.add_argument("--limit", type=float, default=600, help="seconds that one run may take")
    arguments, words = parser.parse_known_args()
    stages = arguments.stages.split(",")
    results: list[Result] = []
    with beside(shlex.split(arguments.beside), results, arguments.limit):
        if "lint" in stages:
            results.append(tool("ruff", [sys.executable, "-m", "ruff", "check", "."], arguments.limit))
            results.append(tool("mypy", [sys.executable, "-m", "mypy"], arguments.limit))
        if "unit" in stages:
            results.append(alone("unit", words, arguments.limit))
    if "lab" in stages:
        results.append(alone("lab", words, arguments.limit))
    pythons = [python for python in arguments.python or [sys.executable] if Path(python).exists()]
    if "mpi" in stages:
        for python in pythons:
            results += [ranks(python, int(count), words, arguments.limit) for count in arguments.ranks.split(",")]
        results += [Result(f"no {python}", 0, 1, 0, 0) for python in {*(arguments.python or ())} - {*pythons}]
    print("\n" + "\n".join(map(str, results)))
    flavours = {find(python=python).flavour for python in pythons}
    if len(flavours) < len(pythons):
        print(f"every environment has the same MPI ({NAMES[flavours.pop()]}): `make test MPI=openmpi` tests both")
    failed = sum(result.failed for result in results)
    print(f"{sum(result.passed for result in results)} passed, {failed} failed")
    return 1 if failed else 0


@contextmanager
def beside(argv: list[str], results: list[Result], limit: float) -> Iterator[None]:
    """Runs `argv` while the block runs, shows afterwards what it printed, and counts it as one test."""
    if not argv:
        yield
        return
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = 1
        finally:
            end(process)
        said.seek(0)
        print(f"\n== {shlex.join(argv)}\n{said.read().strip()}", flush=True)
    results.append(Result("environment", int(not code), int(bool(code)), 0, time.monotonic() - started))


def tool(name: str, argv: list[str], limit: float) -> Result:
    """A checker, as one test."""
    started = time.monotonic()
    failed = run(argv, limit) != 0
    return Result(name, int(not failed), int(failed), 0, time.monotonic() - started)


def alone(stage: str, words: list[str], limit: float) -> Result:
    """The tests of `tests/STAGE`, in one process: unit tests need no MPI, lab tests start it themselves."""
    print(f"\n== {stage} tests", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "0.xml")
        code = run(
            [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *(words or [f"tests/{stage}"])], limit
        )
        return counted(stage, report, code, time.monotonic() - started)


def ranks(python: str, count: int, words: list[str], limit: float) -> Result:
    """The MPI tests on `count` ranks of `python`, under the mpirun that belongs to it."""
    launcher = find(python=python)
    name = f"{NAMES[launcher.flavour]}, {count} ranks"
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        program = (python, "-m", "tests.rank", folder, *(words or ["tests/mpi"]))
        threads = {"OMP_NUM_THREADS": "1"}
        code = run(build(launcher, Job(count, program, threads), this_machine()), limit)
        result = counted(name, Path(folder, "0.xml"), code, time.monotonic() - started)
        if result.failed:
            show(Path(folder))
        return result


def counted(name: str, report: Path, code: int, seconds: float) -> Result:
    """Tests as rank 0's JUnit report counts them; a run that failed without a failing test counts as one."""
    passed = failed = skipped = 0
    if report.is_file():
        for suite in xml.parse(report).iter("testsuite"):
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
            passed += int(suite.get("tests", 0))
        passed -= failed + skipped
    nothing_collected = code == 5
    return Result(name, passed, max(failed, int(code != 0 and not nothing_collected)), skipped, seconds)


def run(argv: list[str], limit: float) -> int:
    """Exit code of `argv`; past `limit` seconds its whole process group is ended."""
    environment = {name: value for name, value in os.environ.items() if not re.match(r"MPIPS_|OMPI_|PMIX_|PMI_", name)}
    process = subprocess.Popen(argv, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"-- not done after {limit:g} s: ended", flush=True)
        return 1
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Asks mpirun to end its ranks, then ends whatever is left of its group."""
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, 10)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def show(folder: Path) -> None:
    """The end of what each rank but the first printed."""
    for log in sorted(folder.glob("*.log"), key=lambda path: int(path.stem)):
        text = log.read_text(errors="replace").strip()
        if text:
            print(f"-- rank {log.stem}\n{text[-TAIL:]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
