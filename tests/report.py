"""Report the results of test runs: numbers of tests, failures, and the tests in which unfinished ranks were.

`python -m tests.report FILE` prints the sums of all results that calls of `tests.run --record FILE` have written.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

from tests import child

# characters to show of the output of a failing rank
TAIL = 6000
# the innermost frame of pytest, which calls the test function
CALLER = " in pytest_pyfunc_call"
# how many of the slowest tests to list
SLOWEST = 20
# tests that take fewer seconds are not listed
SLOW = 0.25
# pytest's exit code if it has found no test
NOTHING_COLLECTED = 5


class Result(NamedTuple):
    """The result of one run."""

    name: str
    passed: int
    failed: int
    skipped: int = 0
    seconds: float = 0.0
    # a line for each failure
    failures: tuple[str, ...] = ()
    # (seconds, test) for each test
    times: tuple[tuple[float, str], ...] = ()

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return f"{self.name:24} {counts}, {self.seconds:.0f} s"


def counted(name: str, report: Path, code: int, seconds: float) -> Result:
    """Make a result from the JUnit report of rank 0. A run that failed without a failing test counts as one failure."""
    tests, failures, skipped = [], [], 0
    for case in xml.parse(report).iter("testcase") if report.is_file() else ():
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        tests.append((float(case.get("time", 0)), test))
        skipped += case.find("skipped") is not None
        wrong = next((part for part in case if part.tag in ("failure", "error")), None)
        if wrong is not None:
            failures.append(f"{test}: {(wrong.get('message') or '').strip().partition(chr(10))[0]}")
    passed = len(tests) - len(failures) - skipped
    # The exit code does not tell whether pytest has finished, because a test may exit with 0.
    ended = report.is_file()
    if not ended or (code not in (0, NOTHING_COLLECTED) and not failures):
        failures.append(f"exit code {code}: " + ("no test failed" if ended else "it did not come to its end"))
    return Result(name, passed, len(failures), skipped, seconds, tuple(failures), tuple(tests))


def unfinished(folder: Path) -> tuple[str, ...]:
    """Return a line for each rank that has not finished: the test in which it was, and its frames."""
    places = sorted(folder.glob("*.now"), key=lambda path: int(path.stem))
    return tuple(
        f"rank {p.stem} was in {p.read_text()}{innermost(p.with_suffix('.stack'))}"
        for p in places
        if not p.with_suffix(".xml").is_file()
    )


def innermost(stack: Path) -> str:
    """Return the frames of the test in which a rank's main thread was, from the file of faulthandler; "" if none."""
    text = stack.read_text(errors="replace") if stack.is_file() else ""
    threads = re.split("^Current thread |^Thread ", text, flags=re.MULTILINE)
    main = next((thread.partition(CALLER)[0] for thread in threads if CALLER in thread), "")
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)
    return "".join(f", in {function} ({Path(file).name}:{line})" for file, line, function in frames)


def show(folder: Path, out: IO[bytes] | None) -> None:
    """Print the end of the output of each rank except rank 0, and the stacks of all ranks."""
    for log in sorted((*folder.glob("*.log"), *folder.glob("*.stack")), key=lambda path: (int(path.stem), path.suffix)):
        text = log.read_text(errors="replace").strip()
        if text:
            child.show(f"-- rank {log.stem}\n{text[-TAIL:]}\n".encode(errors="replace"), out)


def summarise(results: Sequence[Result]) -> None:
    """Print a line for each run, the slowest tests, and the failures. This is the end of the log."""
    print("\n" + "\n".join(map(str, results)))
    times = sorted(((*timed, result.name) for result in results for timed in result.times), reverse=True)
    slow = [f"{seconds:6.1f} s  {name}: {test}" for seconds, test, name in times[:SLOWEST] if seconds >= SLOW]
    if slow:
        print("\nslowest tests\n" + "\n".join(slow))
    failed = sum(result.failed for result in results)
    if failed:
        print("\nfailed")
        print("\n".join(f"  {result.name}: {failure}" for result in results for failure in result.failures))
    print(f"\n{sum(result.passed for result in results)} passed, {failed} failed", flush=True)


def record(file: Path, part: str, seconds: float, results: Sequence[Result]) -> None:
    """Append the results of a call of `tests.run` to a file, as a line of JSON."""
    with file.open("a", encoding="utf-8") as out:
        call = {"part": part, "seconds": seconds, "results": [result._asdict() for result in results]}
        out.write(json.dumps(call) + "\n")


def main() -> None:
    """Print the sums of all calls in a file."""
    calls = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    results = [Result(**result) for call in calls for result in call["results"]]
    passed, failed, skipped = (sum(getattr(result, name) for result in results) for name in Result._fields[1:4])
    minutes = sum(call["seconds"] for call in calls) / 60
    print(f"\n{len(calls)} parts in {minutes:.0f} minutes\nall: {passed} passed, {failed} failed, {skipped} skipped")


if __name__ == "__main__":
    main()
