"""What came of a run: tests counted, where ranks were that did not come to their end, and the end of the log.

`python -m tests.report FILE` prints the sums of what several calls of `tests.run --record FILE` have found.
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

TAIL = 6000  # characters of a failing rank's output that are shown
CALLER = " in pytest_pyfunc_call"  # the innermost frame that is not the test's
SLOWEST = 20
SLOW = 0.25  # seconds
NOTHING_COLLECTED = 5  # pytest's exit code


class Result(NamedTuple):
    """One run: what it was, its tests and seconds, what failed, and (seconds, test) of every test."""

    name: str
    passed: int
    failed: int
    skipped: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    times: tuple[tuple[float, str], ...] = ()

    def __str__(self) -> str:
        counts = f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"
        return f"{self.name:24} {counts}, {self.seconds:.0f} s"


def counted(name: str, report: Path, code: int, seconds: float) -> Result:
    """Tests as rank 0's JUnit report counts them; a run that failed without a failing test counts as one."""
    tests, failures, skipped = [], [], 0
    for case in xml.parse(report).iter("testcase") if report.is_file() else ():
        test = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        tests.append((float(case.get("time", 0)), test))
        skipped += case.find("skipped") is not None
        wrong = next((part for part in case if part.tag in ("failure", "error")), None)
        if wrong is not None:
            failures.append(f"{test}: {(wrong.get('message') or '').strip().partition(chr(10))[0]}")
    passed = len(tests) - len(failures) - skipped
    ended = report.is_file()  # whatever the exit code: a test may have left with 0
    if not ended or (code not in (0, NOTHING_COLLECTED) and not failures):
        failures.append(f"exit code {code}: " + ("no test failed" if ended else "it did not come to its end"))
    return Result(name, passed, len(failures), skipped, seconds, tuple(failures), tuple(tests))


def unfinished(folder: Path) -> tuple[str, ...]:
    """Where the ranks were that have not come to their end."""
    places = sorted(folder.glob("*.now"), key=lambda path: int(path.stem))
    return tuple(
        f"rank {p.stem} was in {p.read_text()}{innermost(p.with_suffix('.stack'))}"
        for p in places
        if not p.with_suffix(".xml").is_file()
    )


def innermost(stack: Path) -> str:
    """The frames of a test in which a rank's main thread was, as faulthandler wrote them; "" if it wrote none."""
    text = stack.read_text(errors="replace") if stack.is_file() else ""
    threads = re.split("^Current thread |^Thread ", text, flags=re.MULTILINE)
    main = next((one.partition(CALLER)[0] for one in threads if CALLER in one), "")
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)
    return "".join(f", in {function} ({Path(file).name}:{line})" for file, line, function in frames)


def show(folder: Path, out: IO[bytes] | None) -> None:
    """The end of what each rank but the first printed, and where each was."""
    for log in sorted((*folder.glob("*.log"), *folder.glob("*.stack")), key=lambda path: (int(path.stem), path.suffix)):
        text = log.read_text(errors="replace").strip()
        if text:
            child.show(f"-- rank {log.stem}\n{text[-TAIL:]}\n".encode(errors="replace"), out)


def summarise(results: Sequence[Result]) -> None:
    """A line a run, the slowest tests, and what failed, where a reader of a long log looks: at its end."""
    print("\n" + "\n".join(map(str, results)))
    times = sorted(((*one, result.name) for result in results for one in result.times), reverse=True)
    slow = [f"{seconds:6.1f} s  {name}: {test}" for seconds, test, name in times[:SLOWEST] if seconds >= SLOW]
    if slow:
        print("\nslowest tests\n" + "\n".join(slow))
    failed = sum(result.failed for result in results)
    if failed:
        print("\nfailed")
        print("\n".join(f"  {result.name}: {failure}" for result in results for failure in result.failures))
    print(f"\n{sum(result.passed for result in results)} passed, {failed} failed", flush=True)


def record(file: Path, part: str, seconds: float, results: Sequence[Result]) -> None:
    """Adds what came of a call of `tests.run` to a file, as a line of JSON."""
    with file.open("a", encoding="utf-8") as out:
        call = {"part": part, "seconds": seconds, "results": [result._asdict() for result in results]}
        out.write(json.dumps(call) + "\n")


def main() -> None:
    """Prints the sums of all calls that a file has."""
    calls = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    results = [Result(**result) for call in calls for result in call["results"]]
    passed, failed, skipped = (sum(getattr(result, name) for result in results) for name in Result._fields[1:4])
    minutes = sum(call["seconds"] for call in calls) / 60
    print(f"\n{len(calls)} parts in {minutes:.0f} minutes\nall: {passed} passed, {failed} failed, {skipped} skipped")


if __name__ == "__main__":
    main()
