"""The communicator of the ranks that are left after deaths, and what they make on it: all of it, or nothing (ULFM).

A process may die at any moment, also while the others make new communicators, which blocks in MPI. So a thread watches
(`collectives.network.failures.Making`), and at the end all agree, uniformly, whether everybody has come through.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from mpi4py import MPI

from collectives.network.failures import Making, deaths
from mpips.store.runtime.errors import LostError

T = TypeVar("T")
DONE, DIED, FAILED = 0b11, 0b10, 0b00
"""How an attempt has ended. Of all ranks' words the bits that all have count."""


class Attempt(NamedTuple, Generic[T]):
    """What came of it: `verdict` is the same on all ranks that live, `results` and `error` are this rank's."""

    verdict: int
    results: list[T]
    error: BaseException | None


def attempt(world: MPI.Intracomm, make: Callable[[MPI.Intracomm], T]) -> Attempt[T]:
    """Shrink `world` to the ranks that live, and call `make` with that. Collective over these ranks, blocking.

    `make` meets the others, on communicators that it passes through `failures.made`. Where a process dies meanwhile it
    raises, on all ranks sooner or later, and the verdict is DIED: to be tried again. Where it raises though all live,
    on whatever rank, that is FAILED.
    """
    left = world.Shrink()
    assert isinstance(left, MPI.Intracomm)
    with suppress(MPI.Exception):
        world.Agree(DONE)  # all have it: nobody may revoke it before
    results: list[T] = []
    raised: BaseException | None = None
    try:
        with Making(left):
            results.append(make(left))
    except Exception as error:
        raised = error
    return Attempt(_agreed(left, DONE if raised is None else _verdict(left, raised)), results, raised)


def _verdict(left: MPI.Intracomm, error: BaseException) -> int:
    return DIED if not isinstance(error, LostError) and deaths(left) else FAILED


def _agreed(left: MPI.Intracomm, verdict: int) -> int:
    try:
        return left.Agree(verdict)
    except MPI.Exception:  # uniformly, too: somebody has died
        return DIED
