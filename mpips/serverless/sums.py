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

    def many(
        self, arrays: Sequence[Array], outs: Sequence[Array], text: str, blocks: Sequence[Array | None] | None = None
    ) -> None:
        """The same of each array, all at once; this worker's block of each sum goes into `blocks`, too."""
        out = None if all(map(is_, arrays, outs)) else outs
        collectives.grouped_allreduce(arrays, self.comm, algorithm=SUMS, out=out, label=text, blocks=blocks)

    def task(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        text: str,
        direct: bool,
        blocks: Sequence[Array | None] | None = None,
    ) -> Task[None]:
        """`one` or `many`, beside compute unless `direct`; workers that block take part in the same collective."""
        single = len(arrays) == 1
        if not direct:
            in_place = all(map(is_, arrays, outs))
            if single:
                plan = self._begin("allreduce", arrays[0], None if in_place else outs[0], text)
            else:
                plan = self._begin(
                    "grouped_allreduce", list(arrays), None if in_place else list(outs), text, blocks=blocks
                )
            yield from in_steps(plan)
        elif single:
            self.one(arrays[0], outs[0], text)
        else:
            self.many(arrays, outs, text, blocks)

    def _begin(self, kind: str, x: Any, out: Any, text: str, **more: Any) -> Plan:
        return begin(kind, x, self.comm, algorithm=SUMS, out=out, label=text, **more)
