"""MPI requests that were under way when an error ended their operation: they and their memory are kept."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI

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
