"""Persistent MPI requests: how a vector is cut into their buffers, and how they are given back.

Those that were under way when an error ended their operation are kept, with their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays import Vector

MESSAGE_BYTES = 4 << 20
_left: list[MPI.Request] = []


def release(requests: Sequence[MPI.Prequest]) -> None:
    """Give persistent requests back to MPI, but for those under way, whose memory MPI may still write to."""
    for request in requests:
        if request.Test():
            request.Free()
        else:
            _left.append(request)


def leave(request: MPI.Request) -> None:
    """Hold on to a request until MPI is through with it."""
    if not request.Test():
        _left.append(request)


def outstanding() -> bool:
    """Whether MPI may still touch memory of an operation that has failed."""
    _left[:] = [request for request in _left if not request.Test()]
    return bool(_left)


def pieces(vector: Vector) -> list[list[Any]]:
    """Buffers of MESSAGE_BYTES at most, as bytes, which every element type is."""
    raw = vector.view(np.uint8)
    return [[raw[at : at + MESSAGE_BYTES], MPI.BYTE] for at in range(0, raw.size, MESSAGE_BYTES)]
