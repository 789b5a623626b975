"""What the store asks of `collectives`' communicators beside calls, until it has epochs of its own: one that has ended
begins anew at the store's next call, as all workers have raised its sentence."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any
from weakref import WeakKeyDictionary

from mpi4py import MPI

from collectives import renew
from collectives.communicator import Communicator, communicator
from collectives.errors import CollectiveError
from collectives.plan import Plan
from mpips.meet import Pause

_looks: WeakKeyDictionary[Communicator, Callable[[], None]] = WeakKeyDictionary()
"""What to call while this rank waits for others there."""
_arrivals: WeakKeyDictionary[Communicator, MPI.Request] = WeakKeyDictionary()
"""All ranks' coming to begin anew what has ended; who gave up waiting has come all the same."""


def living(comm: MPI.Comm) -> Communicator:
    """What `collectives` keeps for the communicator; begun anew if it has ended. Collective, blocking, in that case."""
    home = communicator(comm)
    return home if home.over is None else _renewed(comm, home)


def _renewed(comm: MPI.Comm, over: Communicator) -> Communicator:
    """`renew`, which hears nothing of what others need of this rank before they come: so it is heard here."""
    look = _looks.get(over, lambda: None)
    pause = Pause(lambda: f"a worker's call after: {over.over}: it", *over.limits, lambda waited: look())
    request = _arrivals[over] if over in _arrivals else _arrivals.setdefault(over, comm.Ibarrier())
    while not request.Test():
        pause()
    renew(comm)
    home = communicator(comm)
    home.patient(*over.limits)
    if over in _looks:
        meanwhile(comm, look)
    return home


def in_steps(comm: MPI.Comm, started: Plan, *arrays: Any) -> Generator[bool, None, None]:
    """Go on with a collective, of these arrays, until it is done. Who breaks off ends it for all, as others may count
    on it, and touch the arrays."""
    home = communicator(comm)
    try:
        while not started.test():
            yield False
        started.wait()
    except BaseException:
        what = started.call.text
        home.fail(what, CollectiveError(f"rank {home.rank} has given up {what}"), *arrays)
        raise


def patient(comm: MPI.Comm, stall_seconds: float, timeout_seconds: float) -> Communicator:
    """How long waits on it may last. The first call for a communicator is collective, blocking."""
    home = communicator(comm)
    home.patient(stall_seconds, timeout_seconds)
    return home


def meanwhile(comm: MPI.Comm, look: Callable[[], None]) -> None:
    """What to call now and then while this rank waits in shared memory."""
    home = communicator(comm)
    heard = type(home.board).look

    def both(waited: float) -> None:
        look()
        heard(home.board, waited)

    _looks[home] = look
    home.board.look = both  # type: ignore[method-assign]
