"""Measures the gain from each setting that `mpips run` makes: jobs with and without it, in turn.

    python -m examples.reproduce.settings [--json FILE] [--quick]

docs/measurements.md has the table. A case that this machine cannot run (another MPI, no namespaces) is skipped, with
the reason.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click

from collectives.machine import TUNABLES, choose_long_copies, usable_cores
from collectives.simulator.topology import parse
from collectives.terminal import Interruptible, OutFile, write_text
from launch import FULL_DUPLEX, Job, build, build_rank_command, find, this_machine
from launch.lab import client
from launch.lab.kernel import find_missing
from launch.lab.layout import lay_out

LAB = "measure"
MBIT = 100.0
REPEATS = 3


class Case(NamedTuple):
    """A setting, and a job that shows its gain."""

    name: str
    ranks: int
    # runs on each rank and returns seconds
    work: Callable[[], float]
    # the setting: arguments of the command line, or environment variables
    words: tuple[tuple[str, ...], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    # True if the job runs on emulated hosts
    in_lab: bool = False


def exchange() -> float:
    """Return the seconds of an exchange of 4 MiB in each direction between two ranks.

    Each rank sends two chunks at once, and one more chunk for each chunk that arrives. Servers answer pushes in this
    way, and an allreduce passes from its sum to its gather in this way.
    """
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    peer, chunk = 1 - world.rank, np.ones(1 << 20, np.uint8)
    landing = np.empty((4, 1 << 20), np.uint8)

    def answered() -> None:
        arriving = [world.Irecv(landing[i], peer, i) for i in range(4)]
        leaving = [world.Isend(chunk, peer, i) for i in range(2)]
        while not (MPI.Request.Testall(arriving) and MPI.Request.Testall(leaving)):
            if len(leaving) < 4 and arriving[len(leaving) - 2].Test():
                leaving.append(world.Isend(chunk, peer, len(leaving)))
            time.sleep(0.0003)

    return _median(answered, 3)


def allreduce() -> float:
    """Return the seconds of an allreduce of 64 KiB."""
    import numpy as np
    from mpi4py import MPI

    mine, total = np.ones(1 << 14, np.float32), np.empty(1 << 14, np.float32)
    return _median(lambda: MPI.COMM_WORLD.Allreduce(mine, total), 20)


def few_bytes() -> float:
    """Return the seconds of an allreduce of 8 bytes."""
    import numpy as np
    from mpi4py import MPI

    mine, total = np.ones(2, np.float32), np.empty(2, np.float32)

    def many() -> None:
        for _ in range(1000):
            MPI.COMM_WORLD.Allreduce(mine, total)

    return _median(many, 5) / 1000


def multiply() -> float:
    """Return the seconds of a product of two 768 x 768 matrices, on all ranks at the same time."""
    import numpy as np

    matrix = np.ones((768, 768), np.float32)
    return _median(lambda: matrix @ matrix, 20)


def two_threads() -> float:
    """Return the seconds of two threads that compute in one rank, as a training and a communication thread do."""
    import numpy as np

    values = np.full((2, 1 << 16), 0.5)

    def compute(mine: np.ndarray) -> None:
        for _ in range(40):
            np.cbrt(mine, out=mine)

    def both() -> None:
        threads = [threading.Thread(target=compute, args=(mine,)) for mine in values]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return _median(both, 10)


def copy() -> float:
    """Return the seconds of a copy of 64 MiB."""
    import numpy as np

    source, target = np.ones(1 << 24, np.float32), np.zeros(1 << 24, np.float32)
    return _median(lambda: np.copyto(target, source), 20)


def _median(work: Callable[[], object], count: int) -> float:
    """Return the median seconds of `work` over `count` rounds, on the slowest rank."""
    from mpi4py import MPI

    from collectives.benchmark.harness import measure

    return measure(MPI.COMM_WORLD, [work], 0.0, count)[0].median


CORES = usable_cores()
FIXED = this_machine().fixed_addresses
CASES = (
    Case(
        f"full-duplex TCP: 4 MiB each way at {MBIT:g} Mbit/s, 2 hosts",
        2,
        exchange,
        FULL_DUPLEX,
        in_lab=True,
    ),
    Case(
        f"mpi_yield_when_idle: allreduce of 64 KiB, {2 * CORES} hosts that share {CORES} cores",
        2 * CORES,
        allreduce,
        (("--mca", "mpi_yield_when_idle", "1"),),
        in_lab=True,
    ),
    Case(
        f"setarch -R: allreduce of 8 bytes, {2 * CORES} ranks on {CORES} cores",
        2 * CORES,
        few_bytes,
        (FIXED,) if FIXED else (),
    ),
    Case("--bind-to none: two threads of one rank", 1, two_threads, (("--bind-to", "none"),)),
    Case(
        f"OMP_NUM_THREADS: matrix product on {CORES} ranks, {CORES} cores",
        CORES,
        multiply,
        environment=(("OMP_NUM_THREADS", "1"),),
    ),
    Case(
        f"{TUNABLES}: a copy of 64 MiB on {CORES} ranks, {CORES} cores",
        CORES,
        copy,
        environment=tuple(choose_long_copies({}).items()),
    ),
)


def without(argv: Sequence[str], words: Sequence[Sequence[str]]) -> list[str]:
    """Return `argv` without these words. Raise ValueError if some are missing: two equal jobs would be compared."""
    left = list(argv)
    for run in words:
        place = next((i for i in range(len(left)) if left[i : i + len(run)] == list(run)), None)
        if place is None:
            raise ValueError(f"{' '.join(run)} is not among the settings of this job")
        del left[place : place + len(run)]
    return left


@contextmanager
def prepared(case: Case) -> Iterator[list[str]]:
    """Yield the argv of a case with its setting. Within the context, the lab that the case needs exists."""
    ranks = build_rank_command(["-m", "examples.reproduce.settings", "--work", case.work.__name__])
    if case.in_lab:
        with client.lab(LAB, lay_out(parse(f"star:{case.ranks}", MBIT * 1e6 / 8))):
            yield client.job_command(LAB, case.ranks, ranks)
        return
    yield build(find(), Job(case.ranks, ranks), this_machine())


def compare(case: Case, repeats: int) -> dict[str, object]:
    """Run a case `repeats` times with and without its setting, in turn. Return the row of the report."""
    if any(word.startswith("--") for run in case.words for word in run) and find().flavour != "openmpi":
        return {"setting": case.name, "skipped": "a setting of Open MPI"}
    if case.in_lab and (lacking := find_missing()):
        return {"setting": case.name, "skipped": "; ".join(lacking)}
    if not case.words and not case.environment:
        return {"setting": case.name, "skipped": "not needed on this machine"}
    times: dict[bool, list[float]] = {True: [], False: []}
    with prepared(case) as argv:
        bare = without(argv, case.words)
        for _ in range(repeats):
            for present in (True, False):
                environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", TUNABLES)}
                environment |= dict(case.environment) if present else {}
                times[present].append(_seconds(argv if present else bare, environment))
    yes, no = (statistics.median(times[present]) for present in (True, False))
    return {"setting": case.name, "with_s": yes, "without_s": no, "gain": no / yes}


def _seconds(argv: Sequence[str], environment: dict[str, str]) -> float:
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return float(next(line for line in done.stdout.splitlines() if line.startswith("seconds ")).split()[1])


@click.command("measure", cls=Interruptible)
@click.option("--json", "path", type=OutFile(), help="Write the rows to this file, too.")
@click.option("--quick", is_flag=True, help="Once, and no lab: shows that it works, in seconds.")
@click.option("--work", hidden=True, help="What a rank of a case does.")
def command(path: Path | None, quick: bool, work: str | None) -> None:
    """Measure what each launcher setting is worth on this machine."""
    if work:
        from mpi4py import MPI

        seconds = {case.work.__name__: case.work for case in CASES}[work]()
        if MPI.COMM_WORLD.rank == 0:
            print(f"seconds {seconds}", flush=True)
        return
    rows = [compare(case, 1 if quick else REPEATS) for case in CASES if not (quick and case.in_lab)]
    for row in rows:
        click.echo(_line(row))
    if path:
        write_text(path, json.dumps(rows, indent=1) + "\n")


def _line(row: dict[str, object]) -> str:
    if "skipped" in row:
        return f"{row['setting']}: skipped: {row['skipped']}"
    return f"{row['setting']}: with {row['with_s']:.3g} s, without {row['without_s']:.3g} s, gain {row['gain']:.2f}"


if __name__ == "__main__":
    command()
