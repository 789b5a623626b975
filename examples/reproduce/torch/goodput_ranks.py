"""The program of each rank for `examples.reproduce.torch.goodput`: trains a language model, and survives faults.

python -m examples.reproduce.torch.goodput_ranks PORT REPLICAS BATCH TIMEOUT_SECONDS

Ranks agree on the members of the next group by a store of PyTorch in the driver's process. It holds these keys:

group N: the members of group N, {rank of the job: its handle}, in the order of their ranks in the group
group N/R: the report of rank R of the group before: [the number of steps that it has done, its handle]
spare/R: the handle with which rank R last waited, or still waits, until it is needed
call/H: the number of the group that the spare with handle H is to join, or "end"; until it is set, the spare is free
members, pid/R: the ranks of the current group, and the pid of rank R; the driver makes faults in these processes
last, end/R: the number of steps after which training ends, and a checksum of the parameters that rank R then has
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

import mpips.chaos
import mpips.torch
from collectives.fabric.failure import dead_ranks

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from torch_language import LENGTH, Language, letters

ME, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
LEARNING_RATE = 1e-3
# number of steps between two checks whether training shall end
LOOK_STEPS = 50
# In multiples of the group's timeout: how long members of a group wait for late members before they continue without
# them, and how long the creation of a group may take.
GRACE, MAKING = 0.4, 6.0
# seconds that the members of the first group wait for each other while they start
START_SECONDS = 600.0
POLL_SECONDS = 0.005


class Membership:
    """This process as a replica or as a spare."""

    def __init__(self, store: dist.Store, replicas: int, timeout_seconds: float) -> None:
        self._store = store
        self._replicas = replicas
        self._timeout_seconds = timeout_seconds
        # the number of the latest group that this process knows, and its ranks in the job
        self._number = 0
        self.ranks = list(range(replicas))

    def join(self, steps: int) -> None:
        """Become a member of the next group. Blocking: a rank that is not needed waits as a spare.

        Args:
            steps: The steps that this process has done. Member 0 of the new group is one that has done the most.
        """
        while True:
            if ME in self.ranks:
                self._number += 1
                members = self._agree(steps)
            else:
                self._number = self._wait_as_spare()
                members = json.loads(self._store.get(f"group {self._number}"))
            self.ranks = [int(rank) for rank in members]
            if ME not in self.ranks:
                continue
            try:
                making = timedelta(seconds=MAKING * self._timeout_seconds)
                dist._reconfigure(self._number, list(members.values()), timeout=making).wait()
                return
            except RuntimeError as error:
                if "end its process" in str(error):
                    raise SystemExit(f"rank {ME}: {error}") from None

    def _agree(self, steps: int) -> dict[str, str]:
        """Agree with the other members of the last group on the next one, and return it. Blocking.

        The first member that sees that all living members have come, or that has waited long enough, makes the list.
        Spares take the places of members that have not come. A member that comes too late is not in the list.
        """
        group = f"group {self._number}"
        self._store.set(f"{group}/{ME}", json.dumps([steps, dist._get_reconfigure_handle()]))
        deadline = time.monotonic() + (GRACE * self._timeout_seconds if self._number > 1 else START_SECONDS)
        while not self._store.check([group]):
            # MPI learns of deaths only in its own calls.
            MPI.COMM_SELF.Iprobe()
            dead = dead_ranks(MPI.COMM_WORLD)
            living = [rank for rank in self.ranks if rank not in dead]
            come = [rank for rank in living if self._store.check([f"{group}/{rank}"])]
            if len(come) < len(living) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                continue
            said = {rank: json.loads(self._store.get(f"{group}/{rank}")) for rank in come}
            members = {rank: said[rank][1] for rank in sorted(come, key=lambda rank: -said[rank][0])}
            others = (rank for rank in range(SIZE) if rank not in dead and rank not in self.ranks)
            for rank in others:
                if len(members) < self._replicas and (handle := self._free_handle(rank)):
                    members[rank] = handle
            # If another member was faster, its list stays.
            self._store.compare_set(group, "", json.dumps(members))
        agreed: dict[str, str] = json.loads(self._store.get(group))
        # Every member calls the spares. If only one member did so, it might die before it has called them.
        for rank, handle in agreed.items():
            if int(rank) not in self.ranks:
                self._store.set(f"call/{handle}", str(self._number))
        return agreed

    def _free_handle(self, rank: int) -> str:
        """Return the handle of a spare that waits and was not called, or "" for another rank."""
        if not self._store.check([f"spare/{rank}"]):
            return ""
        handle = self._store.get(f"spare/{rank}").decode()
        return "" if self._store.check([f"call/{handle}"]) else handle

    def _wait_as_spare(self) -> int:
        """Return the number of the group that needs this process. Blocks without polling. Ends the process at the end.

        The store's client waits in a read of its socket, so a spare takes no processor time.
        """
        handle = dist._get_reconfigure_handle()
        self._store.set(f"spare/{ME}", handle)
        called = self._store.get(f"call/{handle}").decode()
        if called == "end":
            raise SystemExit
        return int(called)


def loss_of(model: nn.Module, text: Tensor, seed: int, batch: int) -> Tensor:
    """Return the loss of the model, nats a letter, for a batch of pieces of the text that the seed chooses."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (batch, 1), generator=generator)
    pieces = text[starts + torch.arange(LENGTH + 1)]
    return nn.functional.cross_entropy(model(pieces[:, :-1]).transpose(1, 2), pieces[:, 1:])


def main(port: int, replicas: int, batch: int, timeout_seconds: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(days=1), wait_for_workers=False)
    store.set(f"pid/{ME}", str(os.getpid()))
    text, count = letters()
    model = Language(count)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    # Do what takes long the first time before the first group exists, also on spares: DistributedDataParallel imports
    # the compiler. Member 0 sends its parameters later, so this step does no harm.
    importlib.import_module("torch._dynamo")
    loss_of(model, text, 0, batch).backward()
    optimizer.step()
    dist.init_process_group(
        "mpips",
        store=store,
        rank=ME,
        world_size=SIZE,
        enable_reconfigure=True,
        timeout=timedelta(seconds=timeout_seconds),
    )
    membership, trained, steps, last = Membership(store, replicas, timeout_seconds), None, 0, 0
    while not last or steps < last:
        try:
            if trained is None:
                membership.join(steps)
                state = [(steps, model.state_dict(), optimizer.state_dict())]
                dist.broadcast_object_list(state, group_src=0)
                steps, weights, moments = state[0]
                model.load_state_dict(weights)
                optimizer.load_state_dict(moments)
                trained = nn.parallel.DistributedDataParallel(model, init_sync=False)
                if dist.get_rank() == 0:
                    store.set("members", json.dumps(membership.ranks))
            optimizer.zero_grad()
            loss = loss_of(trained, text, steps * SIZE + dist.get_rank(), batch)
            loss.backward()
            optimizer.step()
            steps += 1
            if dist.get_rank() == 0:
                mpips.chaos.note(steps, loss)
            if steps % LOOK_STEPS == 0 and store.check(["last"]):
                last = int(store.get("last"))
        except RuntimeError:  # a member has died or does not come
            trained = None
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    store.set(f"end/{ME}", f"{zlib.crc32(data):08x}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
