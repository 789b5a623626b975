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


def need(workers: int = 1, **options: Any) -> int:
    """Workers that a store with these options has here; skips where they are fewer than asked for."""
    here = WORLD.size - options.get("servers", 0)
    least = max(workers, options.get("clients", 1))
    if here < least:
        pytest.skip(f"{WORLD.size} ranks are too few for {least} workers and {options.get('servers', 0)} servers")
    return here


def run(kind: str, body: Callable[[mpips.KVStore], Any], comm: MPI.Comm = WORLD, **options: Any) -> Any:
    """`body(kv)` on the workers of a store; the servers serve and return None."""
    try:
        kv = mpips.create(kind, comm=comm, **options)
    except SystemExit:
        return None
    try:
        return body(kv)
    finally:
        kv.close()


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
