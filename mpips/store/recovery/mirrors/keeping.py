"""A mirror's end: versions of other servers' units come in, and are said to be here once they are whole."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.network.failures import is_death
from collectives.network.requests import keep
from mpips.store.recovery.mirrors.copies import Copies, Copy
from mpips.store.recovery.mirrors.letters import DATA_TAG, Kept, Sent, cut, post


class Coming(NamedTuple):
    """A version that is not whole yet."""

    server: int
    sent: Sent
    copy: Copy
    arrays: list[NDArray[Any]]
    requests: list[MPI.Request]


class Keeping:
    """What comes from servers of `comm` in this generation."""

    def __init__(self, comm: MPI.Comm, copies: Copies, generation: int) -> None:
        self._comm, self._copies, self._generation = comm, copies, generation
        self._coming: list[Coming] = []

    def take(self, server: int, sent: Sent) -> None:
        """A version comes."""
        copy = self._copies.of(sent.place)
        arrays = copy.room(sent)
        requests: list[MPI.Request] = []
        if sent.along:
            for array, data in zip(arrays, sent.along, strict=True):
                array.view(np.uint8)[...] = np.frombuffer(data, np.uint8)
        else:
            try:
                for piece in cut(arrays):
                    requests.append(self._comm.Irecv(piece, server, DATA_TAG))
            except MPI.Exception as error:
                if not is_death(error):
                    raise
                keep(requests)
                return
        self._coming.append(Coming(server, sent, copy, arrays, requests))

    def turn(self) -> bool:
        """See what is whole by now, and tell its servers; whether anything is."""
        whole: dict[int, list[int]] = {}
        rest = []
        for coming in self._coming:
            if (there := _there(coming.requests)) is None:
                continue
            if not there:
                rest.append(coming)
                continue
            coming.copy.came(coming.sent, coming.arrays, self._generation)
            whole.setdefault(coming.server, []).append(coming.sent.number)
        self._coming = rest
        for server, numbers in whole.items():
            post(self._comm, Kept(numbers), server)
        return bool(whole)

    def stop(self) -> None:
        """The generation is over: what is not whole does not count."""
        for coming in self._coming:
            keep(coming.requests)
        self._coming = []


def _there(requests: list[MPI.Request]) -> bool | None:
    """Whether all has come; None where the sender has died before."""
    try:
        return bool(MPI.Request.Testall(requests))
    except MPI.Exception:
        keep(requests)
        return None
