"""The sums of all workers, blocking or in steps: single arrays, or many in one collective. Bits depend on neither."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from operator import is_
from typing import Any

from mpi4py import MPI
from numpy.typing import NDArray

import collectives
from collectives.api import begin
from collectives.plan import Plan
from mpips.keys.key import Name
from mpips.runtime.tasks import Task

Array = NDArray[Any]
SUMS = "reproducible"
"""The algorithm: however keys are cut, or put together in lists, every element is added up in the same order."""
SHOWN = 4


def label(what: str, names: Sequence[Name]) -> str:
    """What workers compare, and sentences show: "push of key 'w'"; of more than a few keys their number, and a
    checksum that tells apart whatever is not shown."""
    keys = f"key{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:SHOWN]))}"
    if len(names) > SHOWN:
        checksum = zlib.crc32(repr(list(names)).encode())
        keys += f", ... ({len(names)} in all, {checksum:08x})"
    return f"{what} of {keys}"


def in_steps(plan: Plan) -> Task[None]:
    """Go on with a collective that has begun, until it is over."""
    while not plan.test():
        yield False
    plan.wait()


class Sums:
    """Sums over one communicator of workers. Arrays are C-contiguous; `outs` may be the arrays themselves."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm

    def one(self, array: Array, out: Array, text: str) -> None:
        """out = the sum of all workers' arrays. Collective, blocking."""
        collectives.allreduce(array, self.comm, algorithm=SUMS, out=None if out is array else out, label=text)

    def many(self, arrays: Sequence[Array], outs: Sequence[Array], text: str) -> None:
        """The same of each array, all at once. Collective, blocking."""
        out = None if all(map(is_, arrays, outs)) else outs
        collectives.grouped_allreduce(arrays, self.comm, algorithm=SUMS, out=out, label=text)

    def task(self, arrays: Sequence[Array], outs: Sequence[Array], text: str, direct: bool) -> Task[None]:
        """`one` or `many`, beside compute unless `direct`; workers that block take part in the same collective."""
        single = len(arrays) == 1
        if not direct:
            yield from in_steps(self._begun(arrays, outs, text, single))
        elif single:
            self.one(arrays[0], outs[0], text)
        else:
            self.many(arrays, outs, text)

    def _begun(self, arrays: Sequence[Array], outs: Sequence[Array], text: str, single: bool) -> Plan:
        in_place = all(map(is_, arrays, outs))
        x: Any = arrays[0] if single else list(arrays)
        out: Any = None if in_place else outs[0] if single else list(outs)
        kind = "allreduce" if single else "grouped_allreduce"
        return begin(kind, x, self.comm, algorithm=SUMS, out=out, label=text)
