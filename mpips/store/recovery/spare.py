"""How a spare waits: it sleeps, looks now and then, and takes part in every recovery until it has a role."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from collectives.errors import CollectiveError
from mpips.store.recovery import rebuild
from mpips.store.recovery.fill import Reached, sends
from mpips.store.recovery.inventory import Inventory
from mpips.store.recovery.memory.held import Held, Settled
from mpips.store.recovery.rebuild import Placed
from mpips.store.recovery.renewal import renew
from mpips.store.roles import Layout
from mpips.store.runtime.generation import Generation
from mpips.store.transport.lines import connect

T = TypeVar("T")
SLEEP_SECONDS = 0.01


def wait(generation: Generation, rebuild: Callable[[], list[T]], committed: Callable[[], None]) -> T | None:
    """Wait until this rank has a role, and return what it is then; None where the store ends. Blocking.

    `rebuild` is this rank's part in an attempt to begin the next generation: what the rank has become, or [] where it
    stays a spare. `committed` is called when a generation has begun.
    """
    while not generation.succession.is_closing():
        try:
            generation.look()
        except CollectiveError as error:
            generation.end("the wait of a spare", error)
        if generation.over is None:
            time.sleep(SLEEP_SECONDS)
            continue
        became = renew(generation, rebuild)
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

    def __init__(self, layout: Layout, generation: Generation) -> None:
        self._layout, self._generation = layout, generation
        self._now = Held(connect(layout, generation).ledgers)
        self._settled: Settled[Held] = Settled()

    def held(self) -> Held:
        """What it keeps, in every attempt to begin the next generation."""
        return self._settled.before(self._generation.number, self._now)

    def rebuild(self) -> None:
        """Take part in the others' beginning of the next generation, and stay a spare. Collective, blocking."""
        layout, generation, held = self._layout, self._generation, self.held()
        ledgers = connect(layout, generation).ledgers
        mine = Inventory(held.shelves(layout, generation.number), held.ranks)
        outlook = rebuild.outlook(layout, generation, mine, [None] * layout.num_servers)
        requests = sends(outlook.plan, layout, Reached([], -1, held, generation.number))
        rebuild.place(layout, generation, Placed())
        generation.wait(lambda: MPI.Request.Testall(requests), rebuild.WHAT)
        self._now = Held(ledgers)

    def committed(self) -> None:
        """The next generation has begun: what was before may go."""
        self._settled.begun()
