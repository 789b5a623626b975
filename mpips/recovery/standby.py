"""A spare of a store with servers: it keeps their memory for the others, and may take the place of one that dies."""

from __future__ import annotations

from mpi4py import MPI

from mpips.layout import Layout
from mpips.recovery import rebuild
from mpips.recovery.fill import Reached, sends
from mpips.recovery.inventory import Inventory
from mpips.recovery.memory.held import Held, Settled
from mpips.recovery.rebuild import Placed
from mpips.runtime.epoch import Epoch
from mpips.transport.connect import connect


class StandBy:
    """What a spare does while it is one. Made while workers and servers begin: collective with them, blocking."""

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
