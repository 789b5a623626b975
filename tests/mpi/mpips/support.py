"""What the tests of the store share."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from mpi4py import MPI

import mpips

WORLD = MPI.COMM_WORLD
TAG = 77  # of what tests say to each other
MEETING_TAG = 78


def need(workers: int = 1, **options: Any) -> int:
    """Workers that a store with these options has here; skips where they are fewer than asked for."""
    here = WORLD.size - options.get("servers", 0)
    least = max(workers, options.get("clients", 1))
    if here < least:
        pytest.skip(f"{WORLD.size} ranks are too few for {least} workers and {options.get('servers', 0)} servers")
    return here


def run(kind: str, body: Callable[[mpips.KVStore], Any], comm: MPI.Comm = WORLD, **options: Any) -> Any:
    """`body(kv)` on the workers of a store; the servers serve and return None.

    A worker whose body fails ends the store for all: its close would wait for workers that wait for it.
    """
    try:
        kv = mpips.create(kind, comm=comm, **options)
    except SystemExit:
        return None
    with kv:
        return body(kv)


def meet(kv: mpips.KVStore) -> None:
    """Wait for all workers, without a call of the store. StoreError if one fails in `run` before it comes.

    A worker in a barrier of MPI's own would not hear of that, and the job would hang without a word of what has failed.
    """
    comm = kv.layout.workers
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for other in others:
        comm.Send(b"", other, MEETING_TAG)
    for other in others:
        while not comm.Iprobe(other, MEETING_TAG):
            kv.worker.generation.look()
            time.sleep(1e-4)
        comm.Recv(bytearray(), other, MEETING_TAG)


def failure(call: Callable[[], Any]) -> str:
    """The sentence of the error that a call raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            return str(error)
    return "nothing was raised"


def tells(kv: mpips.KVStore, sources: Iterable[int]) -> None:
    """Wait until these workers have said "go on" (or for half a minute)."""
    comm, until = kv.layout.workers, time.monotonic() + 30
    for source in sources:
        while not comm.Iprobe(source, TAG) and time.monotonic() < until:
            time.sleep(0.01)
        if comm.Iprobe(source, TAG):
            comm.Recv(bytearray(1), source, TAG)
