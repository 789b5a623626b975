"""The table of survival: so many faults, drawn from a seed, in jobs of 4 workers, 2 servers and a spare.

    python -m tests.mpi.chaos.table [--faults 1000] [--seed 1] [--cases NAME,...] [--spares 1] [--keep FOLDER]
    python -m tests.mpi.chaos.table --cases tables,table-half,table-count,table-score,table-clock,table-adam
    python -m tests.mpi.chaos.table --replay FILE --cases NAME

Each job runs the program of its case under a plan of one to three faults. Wanted: exit code 0, no hang, nothing left,
and each bit (asynchronous: each acknowledged push once) as promised. `--keep` takes plans and output of the others.
The exit code is 1 where there are any.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from mpips import chaos
from mpips.chaos import Point
from tests.mpi.chaos import tables
from tests.mpi.chaos.cases import CALLS, CASES, SPARES, draw
from tests.mpi.chaos.job import LIMIT, Result, run

COLUMNS = ("jobs", "faults", "worker kills", "server kills", "failed", "wrong bits", "hangs", "leftovers")


class Table:
    """Counts of all jobs so far, and seconds to go on by what was hit and when."""

    def __init__(self, keep: Path | None) -> None:
        self._keep = keep
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.seconds: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)

    @property
    def faults(self) -> int:
        return sum(count["faults"] for count in self.counts.values())

    @property
    def bad(self) -> int:
        return sum(count["bad"] for count in self.counts.values())

    def add(self, name: str, result: Result) -> None:
        count, report = self.counts[name], result.report
        made = [fault for fault in report.faults if not fault.undone]
        failed = result.wrong.startswith("ended with")
        count.update(
            jobs=1,
            faults=len(made),
            failed=failed,
            hangs=report.hung,
            leftovers=bool(report.left),
            bad=not result.good,
            **{"wrong bits": bool(result.wrong) and not failed},
            **Counter(f"{fault.role} kills" for fault in made if fault.kind == "kill"),
        )
        for fault in made if result.good else ():
            at = result.plan.faults[fault.fault].at
            if fault.seconds is not None and isinstance(at, Point):
                for row in (f"{fault.kind} {fault.role}", f"in {at.call}", f"{fault.kind}s"):
                    self.seconds[row].append((fault.seconds, f"{name} {result.plan.seed}"))
        if not result.good:
            self._tell(name, result)

    def _tell(self, name: str, result: Result) -> None:
        what = "; ".join(filter(None, [result.wrong, "hangs" * result.report.hung, ", ".join(result.report.left)]))
        print(f"\nseed {result.plan.seed}, {name}: {what}", flush=True)
        for fault in result.plan.faults:
            print(f"  {fault}")
        if self._keep:
            self._keep.mkdir(parents=True, exist_ok=True)
            file = self._keep / f"{name}-{result.plan.seed}"
            chaos.save(result.plan, file.with_suffix(".json"))
            file.with_suffix(".txt").write_text(f"{what}\n{result.report}\n{result.said}")

    def show(self) -> None:
        print(f"\n{'':14}" + "".join(f"{column:>14}" for column in COLUMNS))
        for name, count in self.counts.items():
            print(f"{name:14}" + "".join(f"{count[column]:>14}" for column in COLUMNS))
        print(f"\n{'seconds to go on':24}{'faults':>8}{'p50':>8}{'p99':>8}{'most':>8}  in the job")
        for row, found in sorted(self.seconds.items()):
            found.sort()
            p50, p99 = (found[max(0, -(-len(found) * percent // 100) - 1)][0] for percent in (50, 99))
            most, job = found[-1]
            print(f"{row:24}{len(found):>8}{p50:>8.3f}{p99:>8.3f}{most:>8.3f}  {job}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="The table of survival.")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--cases", default=",".join(CASES), help=f"these, or cases of tables: {', '.join(tables.CASES)}"
    )
    parser.add_argument("--spares", type=int, default=SPARES, help="-1: none, and a death ends the job")
    parser.add_argument("--calls", default=",".join(CALLS), help="in which faults happen, or after them")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which no more jobs are started")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a job hangs")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--replay", help="the plan of one job, of the first of the cases")
    asked = parser.parse_args()
    names, table = asked.cases.split(","), Table(asked.keep)
    cases = CASES | dict.fromkeys(tables.CASES, CASES["dist_sync"])
    if asked.replay:
        plan = chaos.load(asked.replay)
        result = run(cases[names[0]], plan, asked.spares, asked.limit, tables.CASES.get(names[0], ""))
        print(result.said, result.report, sep="\n")
        table.add(names[0], result)
    job, began = 0, time.monotonic()
    while not asked.replay and table.faults < asked.faults and time.monotonic() < began + asked.seconds:
        name = names[job % len(names)]
        plan = draw(asked.seed * 100_000 + job, cases[name], asked.spares, asked.calls.split(","))
        table.add(name, run(cases[name], plan, asked.spares, asked.limit, tables.CASES.get(name, "")))
        job += 1
        if job % 20 == 0:
            print(f"{job} jobs, {table.faults} faults, {table.bad} bad, {time.monotonic() - began:.0f} s", flush=True)
    table.show()
    return 1 if table.bad else 0


if __name__ == "__main__":
    sys.exit(main())
