"""How a spare waits: it sleeps, looks now and then, and takes part in every recovery until it has a role."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from collectives.errors import CollectiveError
from mpips.layout import Layout
from mpips.recovery import rebuild
from mpips.recovery.fill import Reached, sends
from mpips.recovery.inventory import Inventory
from mpips.recovery.memory.held import Held, Settled
from mpips.recovery.rebuild import Placed
from mpips.recovery.renewal import renew
from mpips.runtime.epoch import Epoch
from mpips.transport.connect import connect

T = TypeVar("T")
SLEEP_SECONDS = 0.01


def wait(epoch: Epoch, rebuild: Callable[[], list[T]], committed: Callable[[], None]) -> T | None:
    """Wait until this rank has a role, and return what it is then; None where the store ends. Blocking.

    `rebuild` is this rank's part in an attempt to begin the next epoch: what the rank has become, or [] where it stays
    a spare. `committed` is called when an epoch has begun.
    """
    while not epoch.parting.closing():
        try:
            epoch.look()
        except CollectiveError as error:
            epoch.end("the wait of a spare", error)
        if epoch.over is None:
            time.sleep(SLEEP_SECONDS)
            continue
        became = renew(epoch, rebuild)
        if became is None:
            return None
        committed()
        if became:
            return became[0]
    return None


class StandBy:
    """What a spare of a store with servers does while it is one: it keeps their memory for the others.

    Made while workers and servers begin: collective with them, blocking.
    """

    def __init__(self, layout: Layout, epoch: Epoch) -> None:
        self._layout, self._epoch = layout, epoch
        self._now = Held(connect(layout, epoch).ledgers)
        self._settled: Settled[Held] = Settled()

    def held(self) -> Held:
        """What it keeps, in every attempt to begin the next epoch."""
        return self._settled.before(self._epoch.number, self._now)

    def rebuild(self) -> None:
        """Take part in the others' beginning of the next epoch, and stay a spare. Collective, blocking."""
        layout, epoch, held = self._layout, self._epoch, self.held()
        ledgers = connect(layout, epoch).ledgers
        mine = Inventory(held.shelves(layout, epoch.number), held.ranks)
        outlook = rebuild.outlook(layout, epoch, mine, [None] * layout.num_servers)
        requests = sends(outlook.plan, layout, Reached([], -1, held, epoch.number))
        rebuild.place(layout, epoch, Placed())
        epoch.wait(lambda: MPI.Request.Testall(requests), rebuild.WHAT)
        self._now = Held(ledgers)

    def committed(self) -> None:
        """The next epoch has begun: what was before may go."""
        self._settled.begun()
