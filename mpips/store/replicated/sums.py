"""What workers do together, blocking or in steps: above all sums, of single arrays or many. Bits depend on neither."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, TypeAlias

from mpi4py import MPI
from numpy.typing import NDArray

import collectives
from collectives.api import begin
from collectives.communicator import Communicator
from collectives.plan import Plan
from mpips.store.keys.arrays import packed, runs, unpack
from mpips.store.runtime.tasks import Task

Array = NDArray[Any]
SUMS = "reproducible"
"""The algorithm: however keys are cut, or put together in lists, every element is added up in the same order."""
Blocks: TypeAlias = "Sequence[Array | None] | None"
"""Of each of several arrays where this worker's block of the sum goes, too, if anywhere."""


def in_steps(plan: Plan) -> Task[None]:
    """Go on with a collective that has begun, until it is over."""
    while not plan.test():
        yield False
    plan.wait()


class Sums:
    """Collectives over one communicator of workers, `home`. Arrays are C-contiguous; `outs` may be the arrays
    themselves. Workers that block and workers that go in steps take part in the same collective."""

    def __init__(self, home: Communicator, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, home.rank, home.size
        self.one_node = home.size > 1 and home.nodes == 1
        """Whether there are other workers, all on this node."""
        self.begun, self.text = 0, ""
        """Sums that this worker has begun, and the last one."""

    def one(self, array: Array, out: Array, text: str) -> None:
        """out = the sum of all workers' arrays. Collective, blocking."""
        self.begun, self.text = self.begun + 1, text
        collectives.allreduce(array, self.comm, algorithm=SUMS, out=None if out is array else out, label=text)

    def many(self, arrays: Sequence[Array], outs: Sequence[Array], text: str, blocks: Blocks = None) -> None:
        """The same of each array, all at once; this worker's block of each sum goes into `blocks`, too."""
        self.begun, self.text = self.begun + 1, text
        out = None if all(map(is_, arrays, outs)) else outs
        collectives.grouped_allreduce(arrays, self.comm, algorithm=SUMS, out=out, label=text, blocks=blocks)

    def task(
        self,
        arrays: Sequence[Array],
        outs: Sequence[Array],
        text: str,
        direct: bool,
        blocks: Blocks = None,
    ) -> Task[None]:
        """`one` or `many`, beside compute unless `direct`."""
        single = len(arrays) == 1
        if not direct:
            self.begun, self.text = self.begun + 1, text
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

    def give(self, array: Array, root: int, text: str) -> None:
        """The root's array, on all workers. Collective, blocking."""
        collectives.broadcast(array, self.comm, root, label=text)

    def broadcast(self, arrays: Sequence[Array], root: int, text: str, direct: bool) -> Task[None]:
        """`give` of several, beside compute unless `direct`. Small ones travel together."""
        for run in runs(array.nbytes for array in arrays):
            vector = packed(arrays[run])
            if direct:
                self.give(vector, root, text)
            else:
                yield from in_steps(begin("broadcast", vector, self.comm, root=root, label=text))
            unpack(vector, arrays[run])

    def gather(self, x: Array, out: Array | None, text: str, direct: bool) -> Task[None]:
        """All workers' blocks, on all: x -> out; without `out` this worker's is in x already."""
        if direct:
            collectives.allgather(x, self.comm, out=out, label=text)
        else:
            yield from in_steps(begin("allgather", x, self.comm, out=out, label=text))
