"""MPI requests: persistent ones for the buffers that a vector is cut into, and what becomes of those nobody waits for.

Requests that were under way when an error ended their operation are kept, with their memory, until MPI is through with
them: receives are cancelled, and sends end when whoever gives their communicator back drops what was sent on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
from mpi4py import MPI

from collectives.arrays import Vector

MESSAGE_BYTES = 4 << 20
LOOK_AT = 64
_look_at = LOOK_AT
"""At so many requests in `_left` those that are over are dropped."""
_left: dict[int, MPI.Request] = {}
"""By identity; threads add to it and take from it."""
_looking = Lock()
_collectives: list[tuple[MPI.Request, MPI.Comm]] = []
"""MPI's own, which it goes on with on their communicators."""


class Roll:
    """All ranks' coming to a communicator, nobody waiting for it here. Each sends each other one byte, so that it is
    known who is late; a barrier would say nothing of that. Making it is collective, and does not block."""

    def __init__(self, comm: Any) -> None:
        size = comm.Get_size()
        self._come, counts, places = np.zeros(size, np.uint8), [1] * size, list(range(size))
        self._mine = np.ones(size, np.uint8)
        self.request: MPI.Request = comm.Ialltoallv(
            [self._mine, counts, places, MPI.BYTE], [self._come, counts, places, MPI.BYTE]
        )

    def late(self) -> list[int]:
        """Return the ranks that have not come, as far as is known. Local."""
        return np.flatnonzero(self._come == 0).tolist()


class Receive(MPI.Prequest):
    """A persistent request that receives, which can be cancelled."""


def receives(comm: MPI.Comm, vector: Vector, source: int, tag: int) -> list[MPI.Prequest]:
    """Requests that receive a vector."""
    return [Receive(comm.Recv_init(piece, source, tag)) for piece in pieces(vector)]


def sends(comm: MPI.Comm, vector: Vector, target: int, tag: int) -> list[MPI.Prequest]:
    """Requests that send a vector."""
    return [comm.Send_init(piece, target, tag) for piece in pieces(vector)]


def release(requests: Sequence[MPI.Prequest]) -> None:
    """Give persistent requests back to MPI, but for those under way, whose memory MPI may still write to."""
    for request in requests:
        if over(request):
            request.Free()
            continue
        if isinstance(request, Receive):
            request.Cancel()
        _left[id(request)] = request


def keep(requests: Iterable[MPI.Request]) -> None:
    """Hold on to requests that nobody waits for, and so to their memory, until MPI is through with them: MPICH keeps a
    communicator for as long as one was not seen to be over."""
    global _look_at
    _left.update((id(request), request) for request in requests)
    if len(_left) >= _look_at:
        outstanding()
        _look_at = max(LOOK_AT, 2 * len(_left))


def leave(request: MPI.Request, comm: MPI.Comm) -> None:
    """Hold on to the request of a collective of MPI's own until MPI is through with it."""
    if not over(request):
        _collectives.append((request, comm))


def unfinished(comm: MPI.Comm) -> bool:
    """Whether MPI still goes on with a collective on `comm`."""
    _collectives[:] = [kept for kept in _collectives if not over(kept[0])]
    return any(comm == other for _, other in _collectives)


def outstanding() -> bool:
    """Whether MPI may still touch memory of what nobody waits for."""
    if not _looking.locked():  # else another thread looks: two must not test one request
        with _looking:
            _collectives[:] = [kept for kept in _collectives if not over(kept[0])]
            for request in list(_left.values()):
                if _given_back(request):
                    _left.pop(id(request), None)
    return bool(_left or _collectives)


def over(request: MPI.Request) -> bool:
    """Whether MPI is through with a request that nobody waits for, as it is where the other process has died."""
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True


def _given_back(request: MPI.Request) -> bool:
    ended = over(request)
    if ended and isinstance(request, MPI.Prequest):
        request.Free()
    return ended


def pieces(vector: Vector) -> list[list[Any]]:
    """Buffers of MESSAGE_BYTES at most, as bytes, which every element type is."""
    raw = vector.view(np.uint8)
    return [[raw[at : at + MESSAGE_BYTES], MPI.BYTE] for at in range(0, raw.size, MESSAGE_BYTES)]
