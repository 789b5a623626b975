"""What a store holds stays as it is, however many calls and stores come: memory, threads, files, /dev/shm.

Communicators are counted by themselves: an MPI library that runs out of them ends the program.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import mpips
from collectives.fabric.requests import collect_closed
from tests.choice import first
from tests.mpi.mpips.cells import KINDS
from tests.mpi.mpips.faults import WORLD, workers
from tests.mpi.sizes import only_on

GROWTH = 8 << 20  # bytes that memory may grow by: allocators keep some
N = (10, 3000, 100_000)


def held() -> dict[str, int]:
    """What this process holds: bytes of private memory, threads, open files, mappings of shared memory, and the job's
    files in /dev/shm."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "memory": int(status["RssAnon"].split()[0]) << 10,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": sum("memfd" in line or "/dev/shm" in line for line in maps),
        "shm": len(ours(maps)),
    }


def ours(maps: Sequence[str]) -> list[str]:
    """Files in /dev/shm of this job: other jobs of this machine come and go. Open MPI's are named after the job, with
    the rank behind the last dot."""
    mapped = {line.rpartition("/dev/shm/")[2].removesuffix(" (deleted)") for line in maps if "/dev/shm/" in line}
    stems = {name.rpartition(".")[0] or name for name in mapped}
    return [name for name in os.listdir("/dev/shm") if (name.rpartition(".")[0] or name) in stems]


def calls(kv: mpips.KVStore) -> Iterator[Callable[[], None]]:
    """Ways to exchange the keys of a store, which are made here."""
    arrays = [np.zeros(n, np.float32) for n in N]
    shared = [mpips.empty(n, np.float32) for n in N]
    for array in shared:
        array[:] = 0  # results go where they came from, and are summed again
    names = list(range(len(N)))
    kv.init(names, [np.zeros(n, np.float32) for n in N])
    if kv.type.endswith("_async"):
        kv.set_optimizer("sgd", learning_rate=0.0)
    yield lambda: kv.pushpull(names, arrays)
    yield lambda: kv.pushpull(names, [array.copy() for array in shared], shared)
    yield lambda: [kv.pushpull(name, array) for name, array in zip(names, arrays)] and None
    yield lambda: [handle.wait() for handle in [kv.ipushpull(n, a) for n, a in zip(names, arrays)]] and None


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What grew by more than it may."""
    return {
        name: after[name] - before[name]
        for name in before
        if after[name] - before[name] > (GROWTH if name == "memory" else 0)
    }


def over_calls(kind: str, count: int) -> dict[str, int]:
    """What grew on this worker over so many calls."""
    name, options = KINDS[kind]
    try:
        kv = mpips.create(name, comm=WORLD, **options)
    except SystemExit:
        return {}
    comm = workers(options["servers"])
    found: dict[str, int] = {}
    for call in calls(kv):
        for _ in range(30):
            call()
        comm.Barrier()
        before = held()
        for _ in range(count):
            call()
        comm.Barrier()
        found |= grown(before, held())
    kv.close()
    return found


def over_stores(kind: str, count: int) -> dict[str, int]:
    """What grew on this rank over so many stores, half of which end a generation."""
    workers(KINDS[kind][1]["servers"])
    before: dict[str, int] = {}
    for number in range(count + 2):
        if number == 2:
            before = settled()
        _store(kind, number % 2 == 1)
    return grown(before, settled())


def settled() -> dict[str, int]:
    """What this process holds when communicators that were given back are gone. Collective."""
    WORLD.Barrier()
    collect_closed(1.0)
    WORLD.Barrier()
    return held()


def _store(kind: str, fails: bool) -> None:
    name, options = KINDS[kind]
    try:
        kv = mpips.create(name, comm=WORLD, **options)
    except SystemExit:
        return
    made = list(calls(kv))
    for call in made:
        call()
    if fails:
        kv.barrier()  # nobody's call is cut off
        kv.recover()
        made[0]()
    kv.close()


@pytest.mark.slow
@only_on(3)
@first(2, kind=[*KINDS][::2] + [*KINDS][1::2])
def test_calls_leave_nothing_behind(kind):
    assert not over_calls(kind, 200)


@pytest.mark.slow
@only_on(3)
@first(2, kind=[*KINDS][::-1])
def test_stores_leave_nothing_behind(kind):
    assert not over_stores(kind, 6)
