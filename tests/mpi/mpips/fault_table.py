"""The table of faults by kind of store: how many seconds after a fault the slowest worker has heard of it.

    python -m tests.mpi.mpips.fault_table [--python PYTHON]... [--where node,lab] [--faults FAULT,...]

Rows are faults and ways to call, columns are kinds of store. After each fault that ends the generation all workers call
`recover`: what keys hold must be what it says, and twenty more rounds sum exactly. A cell in which that is not so says
why below the table. On one node there are four workers and a server (or five workers); in a lab there are two hosts of
three ranks each. The exit code is 1 where a cell is wrong.
"""

from __future__ import annotations

import json
import sys
import time

from tests.mpi.collectives.fault_table import NOT_DONE, Place, Result, Shape, Table, command
from tests.mpi.mpips.cells import DEADLY, KINDS, LIVING, WAYS, cells, wrong_death

MODULE = "tests.mpi.mpips.faults"
RANKS = 5, 6
LIVE_SECONDS, DIE_SECONDS = 600, 40


def living(place: Place, fault: str) -> Table:
    """All cells of a fault that all ranks live through, in one job."""
    code, said = place.run(["live", fault], LIVE_SECONDS)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"cell"')]
    table = {tuple(line["cell"]): Result(line["seconds"], line["wrong"]) for line in lines}
    if code or len(table) < len(cells([fault])):
        print(f"the job of {fault} ended with {code} after {len(table)} cells:\n{said[-3000:]}")
        missing = next(cell for cell in cells([fault]) if cell not in table)
        table[missing] = Result(None, f"the job ended with {code}")
    return table


def deadly(place: Place, fault: str, way: str, kind: str) -> Result:
    """One cell of which a worker dies, a job of its own."""
    code, said = place.run([fault, way, kind], DIE_SECONDS)
    wrong, seconds = wrong_death(said, fault, kind, place.ranks - KINDS[kind][1]["servers"], time.monotonic())
    if NOT_DONE in said:
        wrong = f"hangs: {said[-500:]}"
    elif not wrong and code == 0:
        wrong = "the job ended with 0"
    return Result(seconds, wrong)


def every(place: Place, faults: list[str]) -> Table:
    """All cells of some faults."""
    table: Table = {}
    for fault in faults:
        if fault in LIVING:
            table |= living(place, fault)
    for cell in cells(fault for fault in faults if fault in DEADLY):
        table[cell] = deadly(place, *cell)
    return table


if __name__ == "__main__":
    sys.exit(command(Shape(LIVING, DEADLY, WAYS, tuple(KINDS), 12), every, module=MODULE, ranks=RANKS))
