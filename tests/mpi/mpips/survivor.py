"""A worker of a job of which ranks are killed, and what its parameters must be in the end.

mpips run --spares N ... -m tests.mpi.mpips.survivor FOLDER JOB, where JOB is the JSON of a `Job`. Each worker
leaves FOLDER/<rank of the job>.trace, with which membership it has made which steps; rank 0 leaves FOLDER/values.npz.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpips
from collectives import communicator
from collectives.fabric.failure import CommCreationGuard
from mpips import optimizers
from mpips.store import roles
from tests.mpi.deaths import die_later, wait_until_dead

SIZES = {"w": 37, "b": 4097, "c": 70001}
"""Of the keys: one passes through slots, one through stages, one from memory to memory."""
LATE_SECONDS = 0.3


@dataclass
class Job:
    """What ranks do. `kills`: after how many seconds which rank dies; the last step waits for all. `grow`: after so
    many steps spares become workers."""

    kind: str = "mpi_sync"
    servers: int = 0
    masters: str = "one"
    spares: int = 0
    steps: int = 200
    optimizer: str = ""
    kills: dict[str, float] = field(default_factory=dict)
    grow: int = 0
    clocks: tuple[int, ...] = ()
    """With the first step of which generation of the store the seconds of each death begin; where nothing is said, when
    a worker has its store."""
    apart: bool = False
    """Whether each rank is a node of its own."""
    mirrors: int = 0
    hosts: tuple[int, ...] = ()
    """Of each rank the host that it pretends to be on."""
    late: int = -1
    """The rank that is through with `create`, and with each `recover`, later than the others."""

    def text(self) -> str:
        return json.dumps(asdict(self))

    def die_in_time(self, folder: Path, rank: str) -> None:
        """Let this rank die when its time has come, if it has one."""
        if (seconds := self.kills.get(rank)) is not None:
            die_later(folder / f"begun{dict(zip(self.kills, self.clocks)).get(rank, '')}", seconds)

    def start_clocks(self, folder: Path, generation: int) -> None:
        """Let seconds count after a step in this generation."""
        for number in range(generation + 1) if self.clocks else ():
            (folder / f"begun{number}").touch()

    def wait_for_deaths(self) -> None:
        """Block until all have died that are to die."""
        wait_until_dead(map(int, self.kills))

    def set(self) -> dict[str, Any]:
        """Numbers of the optimizer."""
        return {"learning_rate": 0.05} | ({"momentum": 0.9} if self.optimizer == "sgd" else {})


def first_values() -> dict[str, np.ndarray]:
    choice = np.random.default_rng(5)
    return {name: choice.standard_normal(size).astype(np.float32) for name, size in SIZES.items()}


def gradient(values: np.ndarray, step: int, rank: int, workers: int) -> np.ndarray:
    """It depends on nothing else, so that a spare in a dead worker's place makes the same."""
    return (values * np.float32(0.1) + np.float32((step * 7 + rank * 13) % 11 / 8 - 0.5)) / np.float32(workers)


def expected(job: Job, traces: Iterable[list[list[int]]]) -> dict[str, np.ndarray]:
    """The values after all steps, each made by as many workers as the traces say."""
    workers = [max(trace for trace in traces if trace[0][0] == 0)[0][1]] * job.steps
    changes = [(step, number, size) for trace in traces for number, (step, size) in enumerate(trace) if number]
    for step, _, size in sorted(changes):
        workers[step:] = [size] * (job.steps - step)
    values = first_values()
    updater = optimizers.create(job.optimizer, **job.set()) if job.optimizer else None
    states = {name: updater.init(array) for name, array in values.items()} if updater else {}
    for step, size in enumerate(workers):
        for name in values:
            total = gradient(values[name], step, 0, size)
            for rank in range(1, size):
                total = total + gradient(values[name], step, rank, size)
            if updater is None:
                values[name] = total
            else:
                updater.update(values[name], total, states[name], step + 1)
    return values


def train(kv: mpips.KVStore, job: Job, folder: Path) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """The loop of a program that survives; what it ends with, and from which step on with how many workers."""
    first, values = first_values(), first_values()
    step, trace, names = kv.resumed, [], list(first)
    while True:
        try:
            for name in names:
                kv.init(name, first[name])
            if job.optimizer:
                kv.set_optimizer(job.optimizer, **job.set())
            for name in names:
                kv.pull(name, values[name])
            while step < job.steps:
                if job.grow and step >= job.grow and kv.spares:
                    step = kv.recover(grow=True).step
                if not trace or trace[-1][1] != kv.num_workers:
                    trace.append([step, kv.num_workers])
                if step == job.steps - 1:
                    job.wait_for_deaths()
                one_step(kv, step, values)
                step += 1
                job.start_clocks(folder, kv.generation)
            return values, trace
        except mpips.StoreError:
            step = kv.recover().step


Train = Callable[[mpips.KVStore, Job, Path], tuple[dict[str, np.ndarray], list[list[int]]]]


def one_step(kv: mpips.KVStore, step: int, values: dict[str, np.ndarray]) -> None:
    """One after the other, all in one call, or beside one another."""
    made = {name: gradient(array, step, kv.rank, kv.num_workers) for name, array in values.items()}
    if step % 3 == 0:
        for name, array in made.items():
            kv.pushpull(name, array, values[name])
    elif step % 3 == 1:
        kv.pushpull(list(made), list(made.values()), list(values.values()))
    else:
        handles = [kv.ipushpull(name, array, values[name]) for name, array in made.items()]
        for handle in handles:
            handle.wait()


def main(folder: Path, job: Job, train: Train = train) -> None:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    if job.apart:
        real = communicator.open_memory
        communicator.open_memory = lambda node: real(node) if node.size == 1 else None
    if job.hosts:
        roles._nodes = lambda world, shared_memory: tuple(job.hosts.index(host) for host in job.hosts)
    if rank == job.late:
        leave = CommCreationGuard.__exit__
        CommCreationGuard.__exit__ = lambda *args: (_be_late(), leave(*args))[1]
    job.die_in_time(folder, str(rank))
    more = {"masters": job.masters, "big_array": 4000} if job.servers else {}
    more |= {"mirrors": job.mirrors}
    kv = mpips.create(job.kind, servers=job.servers, spares=job.spares, shared_memory=not job.apart, **more)
    (folder / "begun").touch()
    values, trace = train(kv, job, folder)
    if kv.rank == 0:
        np.savez(folder / "values.npz", **values)
    (folder / f"{rank}.trace").write_text(json.dumps(trace))
    kv.close()


def _be_late() -> None:
    """Wait within MPI, which hears of deaths meanwhile."""
    until = time.monotonic() + LATE_SECONDS
    while time.monotonic() < until:
        MPI.COMM_SELF.Iprobe()
        time.sleep(1e-3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Job(**json.loads(sys.argv[2])))
