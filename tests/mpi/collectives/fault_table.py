"""The table of faults by kind of call: how many seconds after a fault the slowest rank has heard of it.

    python -m tests.mpi.collectives.fault_table [--python PYTHON]... [--where node,lab] [--faults FAULT,...]

Rows are faults and ways to call, columns are routes. A cell that is not as it should be says so below the table. On one
node there are three ranks; in a lab there are two hosts of two ranks each. The exit code is 1 where a cell is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from launch import Job, build, find, this_machine
from tests import child
from tests.mpi.collectives.cells import DEADLY, LIVING, ROUTES, WAYS, cells, wrong_death

ROOT = Path(__file__).resolve().parents[3]
MODULE = "tests.mpi.collectives.faults"
NOT_DONE = "not done after"  # what `tests.child` says of a job that hangs
LIVE_SECONDS, DIE_SECONDS = 900, 30


class Result(NamedTuple):
    """What came of one cell; no seconds where the launcher ended the job before all had said what they heard."""

    seconds: float | None
    wrong: str


Table = dict[tuple[str, str, str], Result]


class Place:
    """Where jobs of a module run: under which Python, on one node or in a lab of that name."""

    def __init__(self, python: str, lab: str = "", module: str = MODULE, ranks: tuple[int, int] = (3, 4)) -> None:
        self.python, self.lab, self.module = python, lab, module
        self.launcher = find(python=python)
        self.ranks = ranks[bool(lab)]

    def __str__(self) -> str:
        where = f"two hosts of a lab, {self.ranks // 2} ranks each" if self.lab else f"one node, {self.ranks} ranks"
        return f"{self.launcher.flavour} {self.launcher.version}, {where}"

    def run(self, words: list[str], limit: float, survive: bool = False) -> tuple[int, str]:
        """The exit code and the output of a job. `survive`: the launcher leaves the others alone when a rank dies."""
        keep = ("-disable-auto-cleanup",) if survive and self.launcher.flavour == "mpich" else ()
        program = (self.python, "-m", self.module, *words)
        if self.lab:
            from launch.lab import client

            argv = client.job_command(
                self.lab, self.ranks, program, per_host=self.ranks // 2, mpirun=self.launcher.path, extra=keep
            )
        else:
            job = Job(self.ranks, program, {"OMP_NUM_THREADS": "1"}, extra=keep)
            argv = build(self.launcher, job, this_machine())
        said = BytesIO()
        code = child.run(argv, limit, ROOT, said)
        return code, said.getvalue().decode(errors="replace")


def living(place: Place, faults: list[str]) -> Table:
    """All cells of faults that all ranks live through, in one job."""
    code, said = place.run(["live", *faults], LIVE_SECONDS)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"cell"')]
    table = {tuple(line["cell"]): Result(line["seconds"], line["wrong"]) for line in lines}
    if code:
        print(f"the job of {', '.join(faults)} ended with {code}:\n{said[-3000:]}")
    return table


def deadly(place: Place, fault: str, way: str, route: str) -> Result:
    """One cell of which a rank dies, a job of its own."""
    code, said = place.run([fault, way, route], DIE_SECONDS, survive=fault == "kill")
    if fault == "kill" and said.count('"heard"') < place.ranks - 1 and code and NOT_DONE not in said:
        return Result(None, "")
    wrong, seconds = wrong_death(said, place.ranks)
    if not wrong and code == 0 and fault != "kill":
        wrong = "the job ended with 0"
    return Result(seconds, wrong)


class Shape(NamedTuple):
    """A table: faults that ranks live through and those of which one dies, ways to call (rows), and its columns."""

    living: Sequence[str]
    deadly: Sequence[str]
    ways: Sequence[str]
    columns: Sequence[str]
    width: int


SHAPE = Shape(LIVING, DEADLY, WAYS, ROUTES, 9)


def show(place: Place, table: Table, shape: Shape) -> bool:
    """Print a table; whether all is well."""
    print(f"\n{place}\n\n{'fault':10} {'call':9}" + "".join(f"{column:>{shape.width}}" for column in shape.columns))
    for fault in (*shape.living, *shape.deadly):
        for way in shape.ways:
            found = [table.get((fault, way, column)) for column in shape.columns]
            if any(found):
                print(f"{fault:10} {way:9}" + "".join(f"{_cell(one):>{shape.width}}" for one in found))
    bad = {cell: result.wrong for cell, result in table.items() if result.wrong}
    for cell, words in bad.items():
        print(f"wrong: {' '.join(cell)}: {words[:400]}")
    print(f"{len(table)} cells, {len(bad)} wrong", flush=True)
    return not bad


def _cell(result: Result | None) -> str:
    if result is None:
        return "-"
    if result.wrong:
        return "wrong"
    return "ended" if result.seconds is None else f"{max(result.seconds, 0):.2f}"


@contextmanager
def places(
    pythons: list[str], where: list[str], module: str = MODULE, ranks: tuple[int, int] = (3, 4)
) -> Iterator[list[Place]]:
    """All places for jobs of a module, of so many ranks on a node and in a lab, which lives as long as it is needed."""
    found = [Place(python, "", module, ranks) for python in pythons if "node" in where]
    if "lab" not in where:
        yield found
        return
    from collectives.simulator.topology import parse
    from launch.lab import client
    from launch.lab.layout import lay_out

    with client.lab(f"faults-{os.getpid()}", lay_out(parse("star:2", 125e6))) as lab:
        yield [*found, *(Place(python, lab, module, ranks) for python in pythons)]


def command(shape: Shape, made: Callable[[Place, list[str]], Table], **where: Any) -> int:
    """The command line of a table; the exit code. `made` makes the cells of some faults in a place."""
    parser = argparse.ArgumentParser(description="The table of faults by kind of call.")
    parser.add_argument("--python", action="append", help="an interpreter, and its MPI; may be repeated")
    parser.add_argument("--where", default="node,lab")
    parser.add_argument("--faults", default=",".join((*shape.living, *shape.deadly)))
    arguments = parser.parse_args()
    good = True
    with places(arguments.python or [sys.executable], arguments.where.split(","), **where) as found:
        for place in found:
            good &= show(place, made(place, arguments.faults.split(",")), shape)
    return 0 if good else 1


def every(place: Place, faults: list[str]) -> Table:
    """All cells of some faults."""
    table = living(place, [fault for fault in faults if fault in LIVING])
    for cell in cells(fault for fault in faults if fault in DEADLY):
        table[cell] = deadly(place, *cell)
    return table


if __name__ == "__main__":
    sys.exit(command(SHAPE, every))
