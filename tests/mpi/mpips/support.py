"""What the tests of the store share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

import mpips

WORLD = MPI.COMM_WORLD


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
