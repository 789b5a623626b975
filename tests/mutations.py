"""Twenty faults in the hot paths, and whether the tests see them: `python -m tests.mutations [NAME ...]`.

Each is put into a copy of this checkout, and tests of `make test` run there until one fails. A fault that none sees is
printed as missed, and the exit code is 1 where there is any.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 400  # seconds for one run of tests
IGNORED = shutil.ignore_patterns(".git", ".venv*", "out", ".*_cache", "__pycache__", ".hypothesis")


class Mutation(NamedTuple):
    """A fault: `old` stands once in `file` and becomes `new`. `tests`: (ranks, or 0 for unit tests; place), in turn."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[tuple[int, str], ...]


COLLECTIVES = ((3, "tests/mpi/collectives"), (2, "tests/mpi/collectives"))
STORE = ((0, "tests/unit/mpips/server"), (3, "tests/mpi/mpips"), (2, "tests/mpi/mpips"))
RECOVERY = ((0, "tests/unit/mpips/recovery"), (1, "tests/mpi/mpips"), (3, "tests/mpi/mpips"))
OPTIMIZERS = ((0, "tests/unit/mpips/optimizers"),)
MUTATIONS = (
    Mutation("the third rank's number is left out of a sum of scalars", "collectives/node/executor.py",
             "            out[0] = out[0] + part[0]\n", "            out[0] = out[0]\n", COLLECTIVES),
    Mutation("a mean of scalars is divided by one rank less", "collectives/node/executor.py",
             "out[i] = out[i] / ranks", "out[i] = out[i] / (ranks - 1)", COLLECTIVES),
    Mutation("a rank follows others that have not finished their phase", "collectives/fabric/board.py",
             "while int.from_bytes(row, ORDER) != finished:", "while False:", COLLECTIVES),
    Mutation("slots of even and odd calls are one", "collectives/node/program.py",
             "memory.slot(rank, parity)", "memory.slot(rank, 0)", COLLECTIVES),
    Mutation("a plan of many arrays is found for other arrays of the same sizes", "collectives/plan.py",
             "all(map(is_, [ref() for ref in self.arrays], arrays))", "True", COLLECTIVES),
    Mutation("the ring's allgather is left out of its allreduce", "collectives/schedule/ring.py",
             '    if kind in ("allgather", "allreduce", "broadcast"):', '    if kind in ("allgather", "broadcast"):',
             ((0, "tests/unit/collectives"), *COLLECTIVES)),
    Mutation("a mean over messages is not divided", "collectives/network/messages.py",
             "mean = call.operation is not None and call.operation.is_mean", "mean = False", COLLECTIVES),
    Mutation("the first block is not kept before it is written", "mpips/store/server/reduce.py",
             "unit.undo.keep_old(unit.bounds(first)[0], unit.bounds(stop - 1)[1])",
             "unit.undo.keep_old(unit.bounds(first)[1], unit.bounds(stop - 1)[1])", (*STORE[:1], *RECOVERY)),
    Mutation("threads leave out the first share of a long sum", "mpips/store/server/reduce.py",
             "self._team.share(work, range(len(parts)))", "self._team.share(work, range(1, len(parts)))", STORE),
    Mutation("the second part that arrives replaces the first", "mpips/store/server/reduce.py",
             "                add_parts([unit.total, part], unit.total)\n",
             "                unit.total = part.copy()\n", STORE),
    Mutation("a push does not wait until the last one was taken", "mpips/store/remote/fast.py",
             "if self._flag[0] or self._words[self._mine] != key.round:", "if self._flag[0]:", STORE[1:]),
    Mutation("a pull into the pushed array overtakes its push", "mpips/store/remote/fast.py",
             "apart = out is array or not np.may_share_memory(array, out)", "apart = True", STORE[1:]),
    Mutation("a synchronous pull may read a round too early", "mpips/store/server/state.py",
             "return unit.round >= round_\n", "return unit.round >= round_ - 1\n", STORE),
    Mutation("a worker may be one step further ahead", "mpips/store/server/state.py",
             "present, default=steps) > self.staleness", "present, default=steps) > self.staleness + 1", STORE),
    Mutation("the latest of the keys' rounds is chosen after a death", "mpips/store/recovery/plan.py",
             "common = min((newest[name] for name in names), default=0)",
             "common = max((newest[name] for name in names), default=0)", RECOVERY),
    Mutation("an array of 2-bit gradients keeps no residual", "mpips/compression/compressors.py",
             "            block -= np.multiply(sign, self.threshold, dtype=block.dtype)\n",
             "            block[...] = 0\n", ((0, "tests/unit/mpips/compression"), *STORE[1:])),
    Mutation("Nesterov's momentum leaves out the gradient", "mpips/optimizers/sgd.py",
             "step = velocity * self.momentum + d if", "step = velocity * self.momentum if", OPTIMIZERS),
    Mutation("elastic averaging moves away from the centre", "mpips/optimizers/elastic.py",
             "return w + (scaled", "return w - (scaled", OPTIMIZERS),
    Mutation("layers are pulled before the compute that is left", "mpips/overlap/joint.py",
             "through = transfer[i + 1 : m + 1] + np.maximum(to_go[i + 1 : m + 1], rest[i])",
             "through = transfer[i + 1 : m + 1] + to_go[i + 1 : m + 1]", ((0, "tests/unit/mpips/overlap"),)),
    Mutation("a key's emptiest server is the fullest", "mpips/store/keys/sharding.py",
             "emptiest = min(range(len(self.loads)), key=self.loads.__getitem__)",
             "emptiest = max(range(len(self.loads)), key=self.loads.__getitem__)",
             ((0, "tests/unit/mpips/keys"), *STORE[1:])),
)  # fmt: skip


def run(checkout: Path, ranks: int, place: str) -> bool:
    """Return whether tests of a checkout pass, until the first that fails; a run past its limit has not."""
    if ranks:
        words = ["-m", "tests.run", "--stages", "mpi", "--ranks", str(ranks), "--limit", str(LIMIT), "-x", place]
    else:
        words = ["-m", "pytest", "-q", "-x", place]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    try:
        done = subprocess.run(
            [sys.executable, *words], cwd=checkout, env=environment, capture_output=True, timeout=LIMIT + 30,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def seen_by(mutation: Mutation) -> str:
    """Return the first tests that see a fault; "" where none does."""
    with tempfile.TemporaryDirectory(prefix="mutated") as folder:
        checkout = Path(folder, "checkout")
        shutil.copytree(ROOT, checkout, ignore=IGNORED)
        file = checkout / mutation.file
        file.write_text(file.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")
        for ranks, place in mutation.tests:
            if not run(checkout, ranks, place):
                return f"{place}, {ranks} ranks" if ranks else place
    return ""


def chosen(words: Sequence[str]) -> list[Mutation]:
    """Return the faults of which a name contains one of these words; all where there are none."""
    return [one for one in MUTATIONS if not words or any(word in one.name for word in words)]


def main() -> None:
    """Command line."""
    table, missed = Table(title="Faults in the hot paths, and the first tests that see them"), 0
    for title in ("fault", "in", "seen by", "seconds"):
        table.add_column(title)
    for mutation in chosen(sys.argv[1:]):
        begun = time.monotonic()
        where = seen_by(mutation)
        missed += not where
        seconds = time.monotonic() - begun
        print(f"{where or 'MISSED'}: {mutation.name} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        table.add_row(mutation.name, mutation.file, where or "MISSED", f"{seconds:.0f}")
    Console(width=160).print(table)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
