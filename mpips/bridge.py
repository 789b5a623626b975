"""What the store asks of `collectives`' communicators beside calls, until it has epochs of its own: one that has ended
begins anew at the store's next call, as all workers have raised its sentence."""

from __future__ import annotations

from collections.abc import Callable

from mpi4py import MPI

from collectives import renew
from collectives.communicator import Communicator, communicator

_looks: dict[int, Callable[[], None]] = {}
"""By the handle of a communicator: what to call while this rank waits on it."""


def living(comm: MPI.Comm) -> Communicator:
    """What `collectives` keeps for the communicator; begun anew if it has ended. Collective, blocking, in that case."""
    home = communicator(comm)
    if home.over is None:
        return home
    limits = home.limits
    renew(comm)
    home = communicator(comm)
    home.patient(*limits)
    if comm.handle in _looks:
        meanwhile(comm, _looks[comm.handle])
    return home


def patient(comm: MPI.Comm, stall_seconds: float, timeout_seconds: float) -> Communicator:
    """How long waits on it may last. The first call for a communicator is collective, blocking."""
    home = communicator(comm)
    home.patient(stall_seconds, timeout_seconds)
    return home


def meanwhile(comm: MPI.Comm, look: Callable[[], None]) -> None:
    """What to call now and then while this rank waits in shared memory."""
    board = communicator(comm).board
    heard = type(board).look

    def both(waited: float) -> None:
        look()
        heard(board, waited)

    _looks[comm.handle] = look
    board.look = both  # type: ignore[method-assign]
