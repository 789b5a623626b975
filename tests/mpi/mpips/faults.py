"""Faults made on purpose in a store. A *cell* is a fault, a way to call, and a kind of store.

`run` makes one cell that all ranks live through, and tells what every worker has seen. As a program this module makes
all cells of some faults one after the other, or one of which a worker dies, and with it the job:

    mpirun -n P python -m tests.mpi.mpips.faults live FAULT...
    mpirun -n P python -m tests.mpi.mpips.faults FAULT WAY KIND

`tests.mpi.mpips.fault_table` starts both and prints a table.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import mpips
from mpips.optimizers import Add
from tests.mpi.collectives.support import hear, interrupted
from tests.mpi.mpips.cells import KINDS, SOON, Heard, cells

WORLD = MPI.COMM_WORLD
PATIENCE = 30.0  # seconds that a wait may last in these tests
TIMEOUT = 2.0  # seconds that workers wait for one that has stopped
LATE = 0.2  # seconds after which a worker dies, so that the others wait for it
INTERRUPTED = 0.05
INTERRUPTED_TAG = 7
SIZES = {"a": 100, "b": 600_000}
MORE = 20  # rounds after `recover`
Make = Callable[[int], Any]
MIDDLE = (
    "mpips.store.remote.",
    "mpips.store.replicated.",
    "mpips.store.transport.",
    "mpips.store.runtime.",
    "mpips.collectives.",
)
"""Modules that a call is in once it has begun,"""
EDGES = "mpips.collectives.arrays", "mpips.collectives.recorder."
"""but for these, which look at arguments and note the call before it has."""
PREPARES = "mpips.store.worker.operations", "_prepare"
"""The function in which a call looks at its arguments and makes its tasks, before it begins."""


_WORKERS = [WORLD.Split(int(WORLD.rank >= WORLD.size - servers), WORLD.rank) for servers in range(4)]


def workers(servers: int) -> MPI.Intracomm:
    """A communicator of the tests' own for the workers of a store with so many servers."""
    return _WORKERS[servers]


class Worker:
    """One worker of a cell: its arrays, what it has pushed, and what may therefore be stored.

    In a synchronous store the sum of round r is r times the sum of all ranks + 1; in an asynchronous one every push
    adds rank + 1.
    """

    def __init__(
        self, kv: mpips.KVStore, comm: MPI.Intracomm, way: str, sizes: Mapping[str, int] = SIZES, make: Make = np.zeros
    ) -> None:
        self.kv, self.comm, self.way, self.sizes = kv, comm, way, sizes
        self.rank, self.odd = kv.rank, kv.num_workers - 1
        self.total = kv.num_workers * (kv.num_workers + 1) // 2
        self.sync = kv.type.endswith("_sync")
        self.arrays = {key: make(n) for key, n in sizes.items()}
        self.outs = {key: np.zeros(n) for key, n in sizes.items()}
        self.begun = dict.fromkeys(sizes, 0)  # pushes of this worker
        self.ended = dict.fromkeys(sizes, 0)
        self.base: dict[str, Any] = dict.fromkeys(sizes, 0)  # asynchronous: what `known` pushes of each have made
        self.known = dict.fromkeys(sizes, 0)
        self.apart = dict.fromkeys(sizes, 0)  # asynchronous: pushes that count, of calls that have not ended
        kv.init(list(sizes), [np.zeros(n) for n in sizes.values()])
        if not self.sync:
            kv.set_optimizer(Add())

    def call(self, order: Sequence[str] = ()) -> None:
        """One round of all keys, as the cell calls."""
        kv, order = self.kv, order or list(self.sizes)
        for key in order:
            self.begun[key] += 1
            self.arrays[key][:] = (self.rank + 1) * (self.begun[key] if self.sync else 1)
        if self.way == "list":
            kv.pushpull(list(order), [self.arrays[key] for key in order], [self.outs[key] for key in order])
        elif self.way == "handle":
            started = [kv.ipushpull(key, self.arrays[key], self.outs[key]) for key in order]
            for handle in started:
                handle.wait()
        for key in order:
            if self.way == "pushpull":
                kv.pushpull(key, self.arrays[key], self.outs[key])
            elif self.way == "push":
                kv.push(key, self.arrays[key])
                kv.pull(key, self.outs[key])
            self.ended[key] += 1

    def good(self, times: int) -> bool:
        """Whether so many rounds come out exactly. Collective."""
        for _ in range(times):
            self.call()
            if self.sync and any((self.outs[key] != self.total * self.begun[key]).any() for key in self.sizes):
                return False
            if not self.sync:
                self.comm.Barrier()  # a client across a slow network would keep the others in `barrier` below
        if not self.sync:
            self.kv.barrier()
            for key in self.sizes:
                self.kv.pull(key, self.outs[key])
                expected = self.base[key] + self.total * times
                if (self.outs[key] != expected).any():
                    return False
                self.base[key], self.known[key] = expected, self.ended[key]
            self.kv.barrier()
        return True

    def counted(self) -> None:
        """All that was begun has been done: what is stored in an asynchronous store is known again. Collective."""
        for key, base in self.base.items() if not self.sync else ():
            made = self.comm.allgather(self.ended[key] - self.known[key])
            self.base[key] = base + sum((rank + 1) * n for rank, n in enumerate(made))
            self.known[key] = self.ended[key]

    def wrong_after(self, rounds: mpips.Rounds) -> str:
        """What is not as `recover` has said, "" where all is. Collective. Afterwards rounds count from there."""
        begun, ended = ({key: n[key] - self.known[key] for key in self.sizes} for n in (self.begun, self.ended))
        everybody = self.comm.allgather((dict(rounds), rounds.torn, begun, ended))
        same = slice(0 if self.sync else 1, 2)  # asynchronous: each hears of its own pushes
        if any(said[same] != everybody[0][same] for said in everybody):
            return f"recover said {everybody}"
        for key, round_ in rounds.items():
            self.kv.pull(key, self.outs[key])
            found = np.unique(self.outs[key])
            if key in rounds.torn:
                self._start_again(key)
            elif self.sync:
                if found.tolist() != [self.total * round_]:
                    return f"key {key!r} holds {found[:3] / self.total} rounds, recover said {round_}"
                self.begun[key] = round_
            else:
                ended_, begun_ = (n[key] + self.apart[key] for n in (self.ended, self.begun))
                if not ended_ <= round_ <= begun_:
                    return f"recover said that {round_} pushes of key {key!r} count, of {begun_}; {ended_} have ended"
                self.apart[key] = round_ - self.ended[key]
                least, most = (sum((rank + 1) * said[n][key] for rank, said in enumerate(everybody)) for n in (3, 2))
                more = self.outs[key] - self.base[key]
                if (more < least).any() or (more > most).any():
                    return f"key {key!r} holds {found[:3]}, pushed were {least} to {most} beside {self.base[key]}"
                self.base[key] = self.outs[key].copy()  # shards may be of different age
                self.begun[key] = self.known[key] = self.ended[key]
        self.comm.Barrier()
        return ""

    def _start_again(self, key: str) -> None:
        self.kv.forget([key])
        self.kv.init(key, np.zeros(self.sizes[key]))
        self.begun[key] = self.ended[key] = self.base[key] = self.known[key] = self.apart[key] = 0


class Seen(NamedTuple):
    """What came of a cell, on every worker."""

    heard: list[Heard]
    again: list[Heard]
    """What the next call raised."""
    fault_at: float
    """When the fault was there."""
    wrong: str
    """What was not right afterwards."""
    torn: int
    free: bool
    """Whether some workers do not wait for the odd one, and hear of it in their next call."""

    @property
    def seconds(self) -> float:
        """How long the slowest worker took to hear of it."""
        return max(one.ended - max(self.fault_at, one.begun) for one in self.heard)

    def judged(self, fault: str) -> str:
        """What is not as it should be; "" where all is."""
        said = {one[:2] for one in self.heard}
        if fault == "argument" or not any(one.error for one in self.heard):
            idle = fault in ("argument", "order", "stop")  # where nobody waits, nobody hears
            return self.wrong if idle and said == {("", "")} else f"raised {said}"
        if fault == "shape":
            return self.wrong if len(said) == 1 and self.heard[0].error == "ValueError" else f"raised {said}"
        ended = [one for one in self.heard if one.error not in ("KeyboardInterrupt", "" if self.free else "-")]
        errors = {one.error for one in ended}
        if not all(error.startswith("Store") for error in errors):
            return f"raised {said}"
        sentences = {one.sentence for one in (*ended, *self.again)}
        if len(sentences) != 1 or "" in sentences:
            return f"unlike sentences {sentences}"
        if self.seconds > SOON:
            return f"heard after {self.seconds:.1f} s"
        return self.wrong


def run(fault: str, way: str, kind: str, nodes: bool = False) -> Seen | None:
    """Make one cell that all ranks live through; None on servers. `nodes`: as if every rank had a node for itself.
    Collective over all ranks."""
    name, options = KINDS[kind]
    comm = workers(options["servers"])
    timeout = TIMEOUT if fault == "stop" else PATIENCE
    try:
        kv = mpips.create(
            name, comm=WORLD, timeout_seconds=timeout, stall_seconds=PATIENCE, shared_memory=not nodes, **options
        )
    except SystemExit:
        return None
    seen = _seen(Worker(kv, comm, way), fault)
    kv.close()
    return seen


def _seen(worker: Worker, fault: str) -> Seen:
    kv, comm = worker.kv, worker.comm
    assert worker.good(2), "sums are wrong before any fault"
    comm.Barrier()
    generation = kv.generation
    mine, fault_at = FAULTS[fault](worker)
    heard = hear(mine)
    everybody = comm.allgather((heard, fault_at()))
    every = [one for one, _ in everybody]
    at = max(at for _, at in everybody)
    if fault == "stop":
        at = max(one.begun for one in every[: worker.odd]) + TIMEOUT
    if fault in ("order", "shape"):
        at = max(one.begun for one in every)
    over = any(one.error and one.error != "ValueError" for one in every)
    again = comm.allgather(hear(worker.call)) if over else []
    wrong, torn = "", 0
    if over:
        rounds = kv.recover()
        torn = len(rounds.torn)
        wrong = "" if kv.generation == generation + 1 else f"generation {generation} was followed by {kv.generation}"
        wrong = worker.wrong_after(rounds) or wrong
    else:
        worker.counted()
    if not (wrong or worker.good(MORE)):
        wrong = "wrong sums afterwards"
    wrong = next(filter(None, comm.allgather(wrong)), "")
    return Seen(every, again, at, wrong, torn, not worker.sync)


# ---- faults: the call that this worker makes, and when the fault was there


def _argument(worker: Worker) -> tuple[Callable[[], Any], Callable[[], float]]:
    """The odd worker makes calls with bad arguments, then goes on as if nothing had been."""
    kv, a = worker.kv, worker.arrays["a"]
    bad: list[Callable[[], Any]] = [
        lambda: kv.push("a", a[1:]),
        lambda: kv.push("no key", a),
        lambda: kv.pushpull(["a", "b"], [a, a]),
        lambda: kv.ipushpull("a", a.astype(np.float32), a),
        lambda: kv.pull("a", np.zeros(3)),
        lambda: kv.push("a", a, priority="high"),
    ]

    def refused() -> None:
        for call in bad if worker.rank == worker.odd else ():
            if hear(call).error not in ("ValueError", "TypeError"):
                raise ValueError("a bad argument was taken")
        worker.call()

    return refused, lambda: 0.0


def _shape(worker: Worker) -> tuple[Callable[[], Any], Callable[[], float]]:
    """The odd worker gives another shape to `init`."""
    return lambda: worker.kv.init("c", np.zeros(3 + (worker.rank == worker.odd))), lambda: 0.0


def _order(worker: Worker) -> tuple[Callable[[], Any], Callable[[], float]]:
    """The odd worker takes the keys in another order."""
    return lambda: worker.call(("b", "a") if worker.rank == worker.odd else ("a", "b")), lambda: 0.0


def _stop(worker: Worker) -> tuple[Callable[[], Any], Callable[[], float]]:
    """The odd worker comes later than the others wait."""

    def late() -> None:
        time.sleep(1.3 * TIMEOUT)
        worker.call()

    return late if worker.rank == worker.odd else worker.call, lambda: 0.0


def _interrupt(worker: Worker) -> tuple[Callable[[], Any], Callable[[], float]]:
    """The odd worker is interrupted in the middle of a call, where it waits for worker 0, which comes once it was."""
    marks: list[list[float]] = []
    comm, until = worker.comm, time.monotonic() + PATIENCE

    def calls() -> None:
        """One, which waits for worker 0; where nobody waits for others, again and again until it raises."""
        worker.call()
        while not worker.sync and time.monotonic() < until:
            worker.call()

    def late() -> None:
        while worker.odd and not comm.Iprobe(worker.odd, INTERRUPTED_TAG) and time.monotonic() < until:
            time.sleep(1e-3)
        if worker.odd:
            comm.recv(source=worker.odd, tag=INTERRUPTED_TAG)
        calls()

    def alarmed() -> None:
        try:
            with interrupted(INTERRUPTED, in_the_middle) as found:
                marks.append(found)
                calls()
        finally:
            comm.send(None, 0, INTERRUPTED_TAG)

    return {worker.odd: alarmed, 0: late}.get(worker.rank, calls), lambda: marks[0][0] if marks else 0.0


FAULTS: dict[str, Callable[[Worker], tuple[Callable[[], Any], Callable[[], float]]]] = {
    "argument": _argument,
    "shape": _shape,
    "order": _order,
    "stop": _stop,
    "interrupt": _interrupt,
}


def in_the_middle(frame: FrameType | None) -> bool:
    """Whether a frame belongs to a call of the store that has begun; at its edges an interrupt is the caller's own."""
    modules = []
    while frame is not None:
        modules.append(str(frame.f_globals.get("__name__", "")))
        if (modules[-1], frame.f_code.co_name) == PREPARES:
            return False
        frame = frame.f_back
    return any(module.startswith(MIDDLE) and not module.startswith(EDGES) for module in modules)


# ---- as a program


def live(faults: Sequence[str]) -> None:
    """One rank of a job that makes all cells of these faults. Worker 0 says what came of each."""
    for fault, way, kind in cells(faults):
        seen = run(fault, way, kind)
        if WORLD.rank == 0:
            assert seen is not None
            _say({"cell": (fault, way, kind), "seconds": seen.seconds, "wrong": seen.judged(fault), "torn": seen.torn})


def die(fault: str, way: str, kind: str) -> None:
    """One rank of a job in which the odd worker dies while the others call. Each says what it has heard."""
    name, options = KINDS[kind]
    comm = workers(options["servers"])
    kv = mpips.create(name, comm=WORLD, timeout_seconds=PATIENCE, stall_seconds=PATIENCE, **options)
    worker = Worker(kv, comm, way)
    assert worker.good(2)
    comm.Barrier()
    if kv.rank == worker.odd:
        time.sleep(LATE)
        _say({"rank": kv.rank, "at": time.monotonic()})
        if fault == "exit":
            sys.exit(3)
        raise RuntimeError("a bug of the user's")
    until = time.monotonic() + (PATIENCE if kind != "dist_async" else 2.0)
    heard = hear(worker.call)
    while not heard.error and time.monotonic() < until:
        heard = hear(worker.call)
    _say({"rank": kv.rank, "heard": heard})


def _say(words: dict[str, Any]) -> None:
    os.write(1, f"\n{json.dumps(words)}\n".encode())


if __name__ == "__main__":
    live(sys.argv[2:]) if sys.argv[1] == "live" else die(*sys.argv[1:])
