"""Put about forty faults into the code, and check that the tests see them: `python -m tests.mutations [NAME ...]`.

Each fault is put into a copy of this checkout. There, tests of `make test` and `make test-torch` run until one fails. A
fault that no test sees is printed as MISSED, and the exit code is then 1. Before the first run, all faults are checked:
if the code that a fault replaces has changed, or if its tests do not exist, a message says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
# the folder of the tests that need PyTorch or JAX
TORCH_PLACE = "tests/mpi/torch"
# the interpreter for them, which `make test-torch` makes
TORCH_PYTHON = ROOT / ".venv-torch/bin/python"
# seconds that a run of tests may take
LIMIT = 400
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$|rank \d+ was in (tests/.+?)(?:, in .*)?$", re.MULTILINE)
# the messages of tests.run and of pytest if no test was run
NO_TESTS = "no test has run", "no tests ran"
IGNORED = shutil.ignore_patterns(".git", ".venv*", "out", ".*_cache", "__pycache__", ".hypothesis")


class Mutation(NamedTuple):
    """A fault in the code."""

    # what is wrong
    name: str
    file: str
    # the text in `file` that is replaced; it must occur once
    old: str
    # the replacement
    new: str
    # (number of ranks, or 0 for unit tests; place of the tests), in the order in which they run
    tests: tuple[tuple[int, str], ...]


COLLECTIVES = ((3, "tests/mpi/collectives"), (2, "tests/mpi/collectives"))
STORE = ((0, "tests/unit/mpips/server"), (3, "tests/mpi/mpips"), (2, "tests/mpi/mpips"))
RECOVERY = ((0, "tests/unit/mpips/recovery"), (1, "tests/mpi/mpips"), (3, "tests/mpi/mpips"))
OPTIMIZERS = ((0, "tests/unit/mpips/optimizers"),)
TABLES = (
    (0, "tests/unit/mpips/tables"),
    (0, "tests/unit/mpips/server"),
    (0, "tests/unit/mpips/recovery"),
    (3, "tests/mpi/mpips/test_tables.py"),
    (1, "tests/mpi/mpips"),
    (3, "tests/mpi/mpips"),
)
CHECKPOINTS = (
    (0, "tests/unit/mpips/test_checkpoint.py"),
    (3, "tests/mpi/mpips/test_checkpoints.py"),
    (1, "tests/mpi/mpips"),
    (2, "tests/mpi/mpips"),
    (3, "tests/mpi/mpips"),
)
TORCH = ((2, TORCH_PLACE), (3, TORCH_PLACE), (1, TORCH_PLACE))
LAUNCH = ((0, "tests/unit/launch"), (1, "tests/mpi/launch"))
MUTATIONS = (
    Mutation(
        "a compiled sum leaves the third rank's vector out",
        "collectives/node/short_cut.py",
        "for part in range(added, instruction):",
        "for part in range(added + 1, instruction):",
        ((0, "tests/unit/collectives"), *COLLECTIVES),
    ),
    Mutation(
        "a compiled call counts a phase twice",
        "collectives/node/short_cut.py",
        "            if instruction == FOLLOW:\n                phase += 1\n",
        "            if instruction == FOLLOW:\n                phase += 2\n",
        ((0, "tests/unit/collectives"), *COLLECTIVES),
    ),
    Mutation(
        "a rank follows others that have not finished their phase",
        "collectives/fabric/board.py",
        "while int.from_bytes(row, ORDER) != finished:",
        "while False:",
        COLLECTIVES,
    ),
    Mutation(
        "slots of even and odd calls are one",
        "collectives/node/program.py",
        "memory.slot(rank, parity)",
        "memory.slot(rank, 0)",
        COLLECTIVES,
    ),
    Mutation(
        "a plan of many arrays is found for other arrays of the same sizes",
        "collectives/plan.py",
        "all(map(is_, [ref() for ref in self.arrays], arrays))",
        "True",
        COLLECTIVES,
    ),
    Mutation(
        "the ring's allgather is left out of its allreduce",
        "collectives/schedule/ring.py",
        '    if kind in ("allgather", "allreduce", "broadcast"):',
        '    if kind in ("allgather", "broadcast"):',
        ((0, "tests/unit/collectives"), *COLLECTIVES),
    ),
    Mutation(
        "a mean over messages is not divided",
        "collectives/network/messages.py",
        "mean = call.reduction is not None and call.reduction.is_mean",
        "mean = False",
        COLLECTIVES,
    ),
    Mutation(
        "the first block is not kept before it is written",
        "mpips/store/server/reduce.py",
        "unit.keep_old(unit.bounds(first)[0], unit.bounds(stop - 1)[1])",
        "unit.keep_old(unit.bounds(first)[1], unit.bounds(stop - 1)[1])",
        (*STORE[:1], *RECOVERY),
    ),
    Mutation(
        "threads leave out the first share of a long sum",
        "mpips/store/server/reduce.py",
        "self._team.share(work, range(len(parts)))",
        "self._team.share(work, range(1, len(parts)))",
        STORE,
    ),
    Mutation(
        "the second part that arrives replaces the first",
        "mpips/store/server/reduce.py",
        "                add_parts([unit.total, part], unit.total)\n",
        "                unit.total = part.copy()\n",
        STORE,
    ),
    Mutation(
        "a push does not wait until the last one was taken",
        "mpips/store/remote/fast.py",
        "if self._flag[0] or self._words[self._mine] != key.round:",
        "if self._flag[0]:",
        STORE[1:],
    ),
    Mutation(
        "a pull into the pushed array overtakes its push",
        "mpips/store/remote/fast.py",
        "apart = out is array or not np.may_share_memory(array, out)",
        "apart = True",
        STORE[1:],
    ),
    Mutation(
        "a synchronous pull may read a round too early",
        "mpips/store/server/state.py",
        "return unit.round >= round_\n",
        "return unit.round >= round_ - 1\n",
        STORE,
    ),
    Mutation(
        "a worker may be one step further ahead",
        "mpips/store/server/state.py",
        "present, default=steps) > self.staleness",
        "present, default=steps) > self.staleness + 1",
        STORE,
    ),
    Mutation(
        "the latest of the keys' rounds is chosen after a death",
        "mpips/store/recovery/plan.py",
        "common = min((newest[name] for name in names), default=0)",
        "common = max((newest[name] for name in names), default=0)",
        RECOVERY,
    ),
    Mutation(
        "an array of 2-bit gradients keeps no residual",
        "mpips/compression/compressors.py",
        "            block -= np.multiply(sign, self.threshold, dtype=block.dtype)\n",
        "            block[...] = 0\n",
        ((0, "tests/unit/mpips/compression"), *STORE[1:]),
    ),
    Mutation(
        "Nesterov's momentum leaves out the gradient",
        "mpips/optimizers/sgd.py",
        "step = velocity * self.momentum + d if",
        "step = velocity * self.momentum if",
        OPTIMIZERS,
    ),
    Mutation(
        "elastic averaging moves away from the centre",
        "mpips/optimizers/elastic.py",
        "return w + (scaled",
        "return w - (scaled",
        OPTIMIZERS,
    ),
    Mutation(
        "layers are pulled before the compute that is left",
        "mpips/overlap/joint.py",
        "through = transfer[i + 1 : m + 1] + np.maximum(to_go[i + 1 : m + 1], rest[i])",
        "through = transfer[i + 1 : m + 1] + to_go[i + 1 : m + 1]",
        ((0, "tests/unit/mpips/overlap"),),
    ),
    Mutation(
        "a key's emptiest server is the fullest",
        "mpips/store/keys/sharding.py",
        "emptiest = min(range(len(self.loads)), key=self.loads.__getitem__)",
        "emptiest = max(range(len(self.loads)), key=self.loads.__getitem__)",
        ((0, "tests/unit/mpips/keys"), *STORE[1:]),
    ),
    Mutation(
        "of a push that some shards have the last shard says whether it counts",
        "mpips/store/recovery/plan.py",
        "                pushes[worker] = max(count, pushes.get(worker, 0))\n",
        "                pushes[worker] = count\n",
        ((0, "tests/unit/mpips/recovery/test_recover.py"), *RECOVERY),
    ),
    Mutation(
        "a round of all elements is undone by the rows of the one before",
        "mpips/store/recovery/undo.py",
        "        words[BY_ROWS] = 0\n",
        "",
        ((0, "tests/unit/mpips/recovery/test_memory.py"), *RECOVERY),
    ),
    Mutation(
        "a member of an asynchronous client reads rows before the pushes of its client are applied",
        "mpips/store/remote/sparse.py",
        "            yield from call.run(call.met())\n",
        "",
        ((3, "tests/mpi/mpips/test_store_rows.py"),),
    ),
    Mutation(
        "a unit that is put back by a round keeps the optimizer's later step",
        "mpips/store/recovery/recover.py",
        "        old.go_to_undo_copy()\n",
        "",
        ((0, "tests/unit/mpips/recovery/test_recover.py"), (1, "tests/mpi/mpips/test_survival.py"), *RECOVERY),
    ),
    Mutation(
        "a call that fails again without a death is repeated for ever",
        "mpips/training/recovery.py",
        'advanced = b"" if self._rounds == before else b"advanced"',
        'advanced = b"advanced"',
        ((0, "tests/unit/mpips/test_going_on.py"), (1, "tests/mpi/mpips/training/test_survival.py")),
    ),
    Mutation(
        "after a death the rest of an epoch is dealt as if those who are left had begun it",
        "mpips/training/rejoin.py",
        "position.deal(self._source.batch_size * moment.workers)",
        "position.deal(self._source.batch_size * kv.num_workers)",
        ((1, "tests/mpi/mpips/training/test_survival.py"), (1, "tests/mpi/mpips/training")),
    ),
    Mutation(
        "worker 0 gives its parameters though it has just taken a dead one's place",
        "mpips/torch/optimizer/rejoin.py",
        "giver = next((rank for rank, position in enumerate(positions) if not position.new), -1)",
        "giver = 0",
        ((2, "tests/mpi/torch/test_survival.py"), (1, "tests/mpi/torch/test_survival.py")),
    ),
    Mutation(
        "a row takes over what an undone round has left of optimizer's state in its place",
        "mpips/tables/journal.py",
        "            array[before : int(words[ROWS])] = 0\n",
        "",
        ((0, "tests/unit/mpips/tables/test_journal.py"), *TABLES),
    ),
    Mutation(
        "a new row goes on with the updates that the row before it in its place has counted",
        "mpips/tables/rows.py",
        "for kept in (*self._state, self._counts, self._scores):",
        "for array in self._state:",
        ((0, "tests/unit/mpips/tables/test_rows.py"), *TABLES),
    ),
    Mutation(
        "a push that was under way when its round was refused counts in the next one",
        "mpips/tables/rounds.py",
        "        if request.refusals < self.refusals:\n            return [(asker, self._refusal)]\n        queue =",
        "        queue =",
        ((0, "tests/unit/mpips/server/test_server_tables.py"), *TABLES),
    ),
    Mutation(
        "a second change of a table's numbers takes the first one back",
        "mpips/tables/table.py",
        "        card.numbers = options\n",
        "",
        ((2, "tests/mpi/mpips/test_tables.py"), *TABLES[3:]),
    ),
    Mutation(
        "a rank takes its part of a sum as if all parts were as large as its own",
        "mpips/torch/jobs.py",
        "whole, start = given.clone(), sum(sizes[:rank])",
        "whole, start = given.clone(), rank * sizes[rank]",
        ((3, "tests/mpi/torch/test_backend.py"), (3, "tests/mpi/torch/test_horovod.py"), *TORCH),
    ),
    Mutation(
        "what no_sync has added up is lost where the last backward pass leaves a parameter out",
        "mpips/torch/reducer.py",
        "            if (gradient := self.parameters[index].grad) is not None:\n"
        "                self.take(index, gradient)\n"
        "            else:\n"
        "                self._views[index].zero_()\n"
        "                self._used[index] = 0\n",
        "            self._views[index].zero_()\n            self._used[index] = 0\n",
        ((2, "tests/mpi/torch/test_backward.py"), (2, "tests/mpi/torch/test_data_parallel.py"), *TORCH),
    ),
    Mutation(
        "after a load servers go on with the rate of the file, whatever the groups say",
        "mpips/torch/optimizer/exchange.py",
        "self._records[at], self._numbers[at] = current, {}",
        "self._records[at] = current",
        ((2, "tests/mpi/torch/test_optimizer.py"), (2, "tests/mpi/torch/test_state_dicts.py"), *TORCH),
    ),
    Mutation(
        "of all groups of an optimizer the first one's numbers are compared",
        "mpips/torch/lockstep.py",
        "{name: content(group[name]) for name in NUMBERS if name in group} for group in groups",
        "{name: content(groups[0][name]) for name in NUMBERS if name in groups[0]} for _ in groups",
        ((2, "tests/mpi/torch/test_lockstep.py"), *TORCH),
    ),
    Mutation(
        "fewer workers than have saved drop what the others' compression has kept back",
        "mpips/store/checkpoint/load.py",
        "if number % len(senders(layout)) == group:",
        "if number == group:",
        CHECKPOINTS,
    ),
    Mutation(
        "a pull of what is newer leaves out what a load has brought",
        "mpips/store/checkpoint/load.py",
        "        for record in existing:\n            store.keys[record.key].replaced = True\n",
        "",
        ((2, "tests/mpi/mpips/test_versions.py"), *CHECKPOINTS),
    ),
    Mutation(
        "a job begins anew where none of its checkpoints can be read",
        "mpips/store/checkpoint/resume.py",
        "    if failure is not None:\n        raise failure\n",
        "",
        (*CHECKPOINTS[1:], (1, "tests/mpi/launch")),
    ),
    Mutation(
        "a job that was made smaller stays so when its hosts answer again",
        "launch/restarts.py",
        "changed = fit_to_hosts(wanted)",
        "changed = fit_to_hosts(options)",
        ((0, "tests/unit/launch/test_restarts.py"), *LAUNCH),
    ),
    Mutation(
        "a job of which a rank has failed ends with 0 where another ended well",
        "launch/running/verdict.py",
        "        if presence.code is not None:\n            return presence.code\n        if death",
        "        if death",
        ((0, "tests/unit/launch/test_verdict.py"), *LAUNCH),
    ),
    Mutation(
        "the gradient of a scattered mean is that of the sum",
        "mpips/jax/collective.py",
        'divisor = self.ranks if self.op == "mean" else 1',
        "divisor = 1",
        ((2, "tests/mpi/torch/test_jax.py"),),
    ),
    Mutation(
        "allreduces of Horovod's that go together have the factors of the first",
        "mpips/horovod/negotiation.py",
        "    return (request.op, request.prescale, request.postscale, sorted(set(request.dtypes)))\n",
        "    return (request.op, sorted(set(request.dtypes)))\n",
        ((2, "tests/mpi/torch/test_horovod.py"),),
    ),
)


def misfit(mutation: Mutation) -> str:
    """Return why a fault cannot be put into this checkout or its tests cannot run, or ""."""
    file = ROOT / mutation.file
    count = file.read_text(encoding="utf-8").count(mutation.old) if file.is_file() else 0
    if count != 1:
        return f"what {mutation.name!r} replaces stands {count} times in {mutation.file}, not once: adapt it"
    for _, place in mutation.tests:
        if not (ROOT / place).exists():
            return f"the tests of {mutation.name!r} are not there: {place}"
    return ""


def python_of(place: str) -> str:
    """Return the interpreter for tests. Those that need PyTorch or JAX have their own."""
    return str(TORCH_PYTHON) if place.startswith(TORCH_PLACE) else sys.executable


def run(checkout: Path, ranks: int, place: str) -> str:
    """Run the tests of a place in a checkout. Return the first test that fails, or "" if all pass.

    If the output does not name the failing test, return the place. A run that exceeds the time limit has failed.
    """
    if ranks:
        arguments = ["-m", "tests.run", "--stages", "mpi", "--ranks", str(ranks), "--limit", str(LIMIT), "-x", place]
    else:
        arguments = ["-m", "pytest", "-q", "--color=no", "-x", place]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    try:
        done = subprocess.run(
            [python_of(place), *arguments],
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT + 30,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{place}, past its limit"
    # If no test was run, the exit code is not 0, but no test has failed.
    if any(line.startswith(NO_TESTS) for line in done.stdout.splitlines()):
        print(f"no test of {place} runs on {ranks} ranks, so none sees anything", file=sys.stderr, flush=True)
        return ""
    if not done.returncode:
        return ""
    failed = FAILED.search(done.stdout)
    return (failed[1] or f"{failed[2]}, which did not end") if failed else place


def seen_by(mutation: Mutation) -> str:
    """Return the first test that sees a fault, or ""."""
    with tempfile.TemporaryDirectory(prefix="mutated") as folder:
        checkout = Path(folder, "checkout")
        # Copy links as links: mpips/launch must not become a second copy of launch.
        shutil.copytree(ROOT, checkout, symlinks=True, ignore=IGNORED)
        file = checkout / mutation.file
        file.write_text(file.read_text(encoding="utf-8").replace(mutation.old, mutation.new), encoding="utf-8")
        for ranks, place in mutation.tests:
            if test := run(checkout, ranks, place):
                return f"{test}, {ranks} ranks" if ranks else test
    return ""


def chosen(words: Sequence[str]) -> list[Mutation]:
    """Return the faults whose names contain one of the words. Return all faults if there are no words."""
    return [mutation for mutation in MUTATIONS if not words or any(word in mutation.name for word in words)]


def lacks_python(mutation: Mutation) -> bool:
    """True if the interpreter for one of its tests does not exist."""
    return not all(Path(python_of(place)).exists() for _, place in mutation.tests)


def main() -> None:
    """Run the command line."""
    if wrong := [sentence for mutation in MUTATIONS if (sentence := misfit(mutation))]:
        sys.exit("\n".join(wrong))
    table = Table(title="Faults in what users rely on, and the first tests that see them")
    mutations, seen = chosen(sys.argv[1:]), 0
    for title in ("fault", "in", "seen by", "seconds"):
        table.add_column(title, overflow="fold")
    if any(map(lacks_python, mutations)):
        print(
            f"{TORCH_PYTHON} is not there: faults whose tests need PyTorch or JAX are not tried (`make test-torch` "
            "makes it)",
            file=sys.stderr,
            flush=True,
        )
    for mutation in mutations:
        begun = time.monotonic()
        where = "" if lacks_python(mutation) else seen_by(mutation)
        seen += bool(where)
        outcome = where or ("NOT TRIED" if lacks_python(mutation) else "MISSED")
        seconds = time.monotonic() - begun
        print(f"{outcome}: {mutation.name} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        table.add_row(mutation.name, mutation.file, escape(outcome), f"{seconds:.0f}")
    Console(width=160).print(table)
    print(f"{seen} of {len(mutations)} seen")
    sys.exit(0 if seen == len(mutations) else 1)


if __name__ == "__main__":
    main()
