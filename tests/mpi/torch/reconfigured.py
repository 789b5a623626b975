"""A job whose process group is made anew again and again, while ranks die: each rank says what it has seen.

mpips run -w 3 --spares 2 -m tests.mpi.torch.reconfigured FOLDER SEED [ddp]

With "ddp", ranks that join also train. Without it they do not, because DDP imports PyTorch's compiler, which takes
seconds of each process.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import mpips.torch
from tests.mpi.deaths import die, die_later, stop_here, wait_until_dead, wake_when_stopped
from tests.mpi.torch.support import heard

LIMIT, SHORT = timedelta(seconds=60), timedelta(seconds=1)
ME, SIZE, WORKERS = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, mpips.size()
EVERYBODY = list(range(WORKERS))


class Job:
    """One rank's part: it calls each case, in the order in which they stand here."""

    def __init__(self, folder: Path, seed: int, trains: bool) -> None:
        self.folder = folder
        self.trains = trains
        self.random = random.Random(seed)
        self.store = dist.FileStore(str(folder / "store"), -1)
        # case -> what this rank has seen
        self.seen: dict[str, Any] = {}
        self.uuid = 0
        dist.init_process_group("mpips", store=self.store, rank=ME, world_size=SIZE, enable_reconfigure=True)

    def collect(self, name: str, ranks: Sequence[int]) -> list[str]:
        """Return the handles of these ranks of the job, in this order. Blocks until all have given theirs."""
        if ME in ranks:
            self.store.set(f"{name}/{ME}", dist._get_reconfigure_handle())
        return [self.store.get(f"{name}/{rank}").decode() for rank in ranks]

    def join(self, ranks: Sequence[int], limit: timedelta = LIMIT) -> str:
        """Make the group of these ranks, in this order. Return the error, or "" if rank, size and a sum are right."""
        self.uuid += 1
        handles = self.collect(f"handles {self.uuid}", ranks)
        return heard(lambda: dist._reconfigure(self.uuid, handles, timeout=limit).wait()) or self.check(ranks)

    def check(self, ranks: Sequence[int]) -> str:
        place = dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(dist.group.WORLD)
        expected = ranks.index(ME), len(ranks), [*range(len(ranks))]
        if place != expected:
            return f"{place} is not {expected}"
        total, first = torch.full((5,), float(ME)), torch.full((2,), float(ME))
        dist.all_reduce(total)
        dist.broadcast(first, group_src=0)
        right = total.tolist() == [sum(ranks)] * 5 and first.tolist() == [ranks[0]] * 2
        return "" if right else f"{total.tolist()}, {first.tolist()} are wrong for {list(ranks)}"

    def wait(self, name: str, ranks: Sequence[int]) -> None:
        self.store.set(f"{name}/{ME}", "")
        for rank in ranks:
            self.store.get(f"{name}/{rank}")


def identity(job: Job) -> Any:
    """The same ranks, twice, then in another order."""
    before = heard(lambda: dist.all_reduce(torch.ones(2)))
    return [before, *(job.join(ranks) for ranks in (EVERYBODY, EVERYBODY, EVERYBODY[::-1]))]


def one(job: Job) -> Any:
    """Each rank alone, then all."""
    alone = heard(lambda: dist._reconfigure(1000 + ME, [dist._get_reconfigure_handle()], timeout=LIMIT).wait())
    return [alone or job.check([ME]), job.join(EVERYBODY)]


def split_and_merge(job: Job) -> Any:
    halves = [rank for rank in EVERYBODY if rank % 2 == ME % 2]
    return [job.join(halves), job.join(EVERYBODY)]


def wrong(job: Job) -> Any:
    """What is refused at once leaves the group as it is; what is found out between the ranks ends on all of them."""
    own = str(dist._get_reconfigure_handle())
    stale = ":".join([*own.split(":")[:-1], "0"])
    other = own.replace("mpips:", "mpips:other-", 1)
    tries: dict[str, tuple[int, Sequence[str]]] = {
        "already used": (1, [own]),
        "no handle of mpips": (2001, [own, "gloo:1"]),
        "another MPI job": (2002, [own, other]),
        "is stale": (2003, [stale]),
        "no handle is that of this process": (2004, []),
        "there twice": (2005, [own, own]),
    }
    refused = {words: heard(lambda: dist._reconfigure(*given)) for words, given in tries.items()}  # noqa: B023
    lives = job.check(EVERYBODY)
    handles = job.collect("wrong", EVERYBODY)
    given = handles[::-1] if EVERYBODY[-1] == ME else handles
    unlike = heard(lambda: dist._reconfigure(2006, given, timeout=LIMIT))
    return {"refused": refused, "lives": lives, "unlike": unlike, "after": job.join(EVERYBODY)}


def stale(job: Job) -> Any:
    """One rank's handle is stale: it refuses, and the others do not wait for it."""
    handles = job.collect("stale", EVERYBODY)
    if ME == 0:
        dist._reconfigure(3001, [handles[0]], timeout=LIMIT)
    job.wait("stale, begun", EVERYBODY)
    return [heard(lambda: dist._reconfigure(3002, handles, timeout=LIMIT)), job.join(EVERYBODY)]


def outsider(job: Job) -> Any:
    """The last rank passes a list of others, who then make their group."""
    inside, last = job.collect("outsider", EVERYBODY)[:-1], EVERYBODY[-1]
    said = heard(lambda: dist._reconfigure(3101, inside, timeout=LIMIT)) if last == ME else ""
    job.wait("outsider, refused", EVERYBODY)
    if last != ME:
        said = heard(lambda: dist._reconfigure(3101, inside, timeout=LIMIT).wait()) or job.check(EVERYBODY[:-1])
    return [said, job.join(EVERYBODY)]


def absent(job: Job) -> Any:
    """One rank does not come."""
    handles = job.collect("absent", EVERYBODY)
    late = "" if ME == 0 else heard(lambda: dist._reconfigure(4001, handles, timeout=SHORT))
    job.wait("absent, over", EVERYBODY)
    return [late, job.join(EVERYBODY)]


def late_in_new_group(job: Job) -> Any:
    """Rank 0 calls new_group only when the others have stopped waiting for it."""
    if ME == 0:
        for rank in EVERYBODY[1:]:
            job.store.get(f"late/{rank}")
    late = heard(lambda: dist.new_group(timeout=SHORT))
    job.store.set(f"late/{ME}", "")
    return [late, job.join(EVERYBODY)]


def stopped(job: Job) -> Any:
    """Rank 1 is stopped, at first until the others wait for it, then for longer than they may wait."""
    job.store.set(f"pid/{ME}", str(os.getpid()))
    pid = int(job.store.get("pid/1"))
    if ME == 1:
        stop_here()
    waits = dist.all_reduce(torch.ones(3), async_op=True)
    if ME == 0:
        wake_when_stopped(pid)
    short = heard(waits.wait)
    if ME == 1:
        stop_here()
    late = heard(lambda: dist.monitored_barrier(timeout=SHORT))
    without = "" if ME == 1 else job.join([rank for rank in EVERYBODY if rank != 1])
    if ME == 0:
        wake_when_stopped(pid)
    job.uuid = 4400
    return [short, late, without, job.join(EVERYBODY)]


def shrink(job: Job) -> Any:
    """Rank 1 dies while the others wait for it."""
    works = [dist.all_reduce(torch.ones(3), async_op=True), dist.all_reduce(torch.ones(3), async_op=True)]
    for work in works:
        work.wait()
    job.wait("shrink", EVERYBODY)
    if ME == 1:
        die()
    pending = dist.all_reduce(torch.ones(3), async_op=True)
    received = dist.irecv(torch.ones(3), 1)
    errors = [heard(pending.wait), heard(received.wait)]
    wait_until_dead([1])
    left = [rank for rank in EVERYBODY if rank != 1]
    return {"errors": errors, "left": job.join(left)}


def grow(job: Job) -> Any:
    """The first spare joins, and trains on from the state of the first rank."""
    ranks = [*(rank for rank in EVERYBODY if rank != 1), WORKERS]
    return [job.join(ranks), trained(ranks) if job.trains else [True, []]]


def trained(ranks: Sequence[int]) -> list[Any]:
    """Train by DDP. Return whether the losses are those of one process that has all batches, and the parameters."""
    torch.manual_seed(ME)
    model, alone = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
    wrapped = nn.parallel.DistributedDataParallel(model)
    alone.load_state_dict(model.state_dict())
    steps = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, alone)]
    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(rank)).double() for rank in ranks]
    for _ in range(3):
        for step in steps:
            step.zero_grad()
        wrapped(batches[dist.get_rank()]).pow(2).mean().backward()
        alone(torch.cat(batches)).pow(2).mean().backward()
        for step in steps:
            step.step()
    near = all(torch.allclose(a, b) for a, b in zip(model.parameters(), alone.parameters(), strict=True))
    return [near, model.weight.detach().flatten().tolist()]


def shrink_and_grow(job: Job) -> Any:
    """Rank 0 dies while the others wait for it in new_group, and in the next group the second spare takes its place."""
    job.wait("shrink and grow", [*(rank for rank in EVERYBODY if rank != 1), WORKERS, WORKERS + 1])
    if ME == 0:
        die()
    said = "" if ME == WORKERS + 1 else heard(dist.new_group)
    wait_until_dead([0])
    ranks = [*(rank for rank in EVERYBODY if rank > 1), WORKERS, WORKERS + 1]
    return [job.join(ranks), trained(ranks) if job.trains else [True, []], said]


def death(job: Job) -> Any:
    """A rank dies at some moment of a reconfigure. Then those that are not stuck in MPI make a group."""
    ranks = [*(rank for rank in EVERYBODY if rank > 1), WORKERS, WORKERS + 1]
    victim, seconds = job.random.choice(ranks), job.random.uniform(0, 0.05)
    handles, begun = job.collect("death", ranks), job.folder / "begun"
    if victim == ME:
        die_later(begun, seconds)
    job.wait("death, begun", ranks)
    begun.touch()
    start = time.monotonic()
    error = heard(lambda: dist._reconfigure(5001, handles, timeout=LIMIT))
    # The victim may outlive the call by some milliseconds.
    while not error:
        error = heard(lambda: dist.barrier())
    if victim == ME:
        time.sleep(LIMIT.total_seconds())
    took = time.monotonic() - start
    wait_until_dead([victim])
    refused = heard(lambda: dist._reconfigure(5100 + ME, [dist._get_reconfigure_handle()], timeout=LIMIT).wait())
    job.store.set(f"death, refused/{ME}", refused)
    left = [rank for rank in ranks if rank != victim and not job.store.get(f"death, refused/{rank}")]
    said = "" if refused else job.join(left)
    return {"victim": victim, "error": error, "took": took, "refused": refused, "left": said}


CASES: tuple[tuple[Callable[[Job], Any], range], ...] = (
    (identity, range(WORKERS)),
    (one, range(WORKERS)),
    (split_and_merge, range(WORKERS)),
    (wrong, range(WORKERS)),
    (stale, range(WORKERS)),
    (outsider, range(WORKERS)),
    (absent, range(WORKERS)),
    (late_in_new_group, range(WORKERS)),
    (stopped, range(WORKERS)),
    (shrink, range(WORKERS)),
    (grow, range(WORKERS + 1)),
    (shrink_and_grow, range(WORKERS + 2)),
    (death, range(WORKERS + 2)),
)


def main(folder: Path, seed: int, *words: str) -> None:
    torch.set_num_threads(1)
    job = Job(folder, seed, "ddp" in words)
    for number, (case, ranks) in enumerate(CASES):
        job.uuid = 10 * number
        if ME in ranks:
            job.seen[case.__name__] = case(job)
            # A rank that dies in a later case has said what it has seen before.
            Path(folder, f"rank-{ME}.json").write_text(json.dumps(job.seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
