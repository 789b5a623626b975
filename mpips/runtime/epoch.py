"""One epoch of a store: it ends once, for all ranks, with one sentence; `renew` begins the next.

An epoch stands on what `collectives` keeps for the store's world: a flag and a sentence in memory that the ranks of a
node share, and notes between nodes. Who finds a failure calls `end`; every wait looks, and raises the same sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpips.runtime.errors import EpochError

if TYPE_CHECKING:
    from mpi4py import MPI

    from collectives.communicator import Communicator
    from collectives.node.wait import Limits
    from mpips.layout import Layout


class Epoch:
    """The present epoch of one store, as one rank sees it. Making it is collective over `layout.world`, blocking."""

    number: int
    """0, and one more after each `renew`."""
    rank: int
    size: int
    limits: Limits
    """`stall_seconds` and `timeout_seconds` of the store's options."""
    one_node: bool
    """Whether all ranks of the store share memory."""
    flag: memoryview
    """flag[0] != 0 once the epoch has ended on this node. `renew` replaces it."""
    over: EpochError | None
    on_end: list[Callable[[], None]]
    """What this rank does once when it learns that the epoch is over, before it raises: it sees to it that nobody reads
    arrays that it has lent, and that what others count on is there."""

    def __init__(self, layout: Layout) -> None: ...

    def check(self) -> None:
        """Raise EpochError if the epoch has ended on this node. Cheap; sends and receives nothing."""

    def look(self, waited: float = 0.0) -> None:
        """The same from within a wait of so many seconds: also hears other nodes, and sees whose process has ended."""

    def end(self, what: str, error: BaseException) -> BaseException:
        """`what` has raised `error` on this rank: end the epoch for all ranks; what this rank is to raise.

        That is an EpochError with the sentence that all ranks raise where the error is one of `collectives`, of MPI or
        of the epoch; else `error` itself. Idempotent. Blocks for some seconds at most, until nobody touches arrays that
        this rank has lent.
        """
        raise NotImplementedError

    @contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """Whatever is raised within ends the epoch."""
        yield

    def within(self, comm: MPI.Intracomm, names: Sequence[int] = ()) -> Communicator:
        """What `collectives` keeps for a smaller communicator of the store, such as that of the workers, with the
        store's limits. Waits there look at the epoch, too: it ends with the epoch. Collective over `comm` at first."""
        raise NotImplementedError

    def wait(self, ready: Callable[[], object], what: str, late: Callable[[], Sequence[int]] = tuple) -> None:
        """Wait until `ready()`; blocking. Looks at the epoch; warns, and raises StallError, after the limits, naming the
        ranks of `late()`."""

    def meet(self, payload: bytes, what: str, everybody: bool = False) -> list[bytes]:
        """See `rendezvous.exchange`."""
        raise NotImplementedError

    def renew(self) -> None:
        """Begin the next epoch on the same ranks. Collective over all ranks of the store, blocking: the layout's
        communicators are new ones (`Layout.again`), and what was sent on the old ones is dropped."""

    def close(self) -> None:
        """The store ends on this rank: wait for the others, and give all communicators back. Collective over all ranks
        of the store. Waits for nobody for longer than some seconds once the epoch is over."""
