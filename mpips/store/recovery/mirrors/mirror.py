"""A server's mirror in one generation, and the servers that it mirrors itself."""

from __future__ import annotations

from collections.abc import Iterable

from collectives.errors import warn
from mpips.store.recovery.mirrors.copies import Copies
from mpips.store.recovery.mirrors.keeping import Keeping
from mpips.store.recovery.mirrors.letters import Filled, Gone, Kept, Sent, post, taken
from mpips.store.recovery.mirrors.ring import mirror_of
from mpips.store.recovery.mirrors.sending import Sending
from mpips.store.roles import Layout
from mpips.store.server.unit import Unit


class Mirror:
    """Both ends, on one server."""

    def __init__(self, layout: Layout, copies: Copies, generation: int) -> None:
        assert layout.servers is not None
        self._comm, self._copies, self._generation = layout.servers, copies, generation
        nodes = [layout.nodes[layout.server_rank(server)] for server in range(layout.num_servers)]
        mine = layout.rank - layout.num_workers
        mirror = mirror_of(mine, nodes)
        self._sending = None if mirror is None else Sending(self._comm, mirror, layout.asynchronous)
        self._keeping = Keeping(self._comm, copies, generation)
        self._others = [server for server in range(layout.num_servers) if server != mine]
        self._unfilled = set(range(layout.num_servers))
        """Servers whose units are not all with their mirror yet."""
        self._told = False
        self._mine = mine
        if mirror is None and mine == 0:
            warn("mirrors=1, but all servers that are left share one node: another loss of a node loses what is stored")

    @property
    def quiet(self) -> bool:
        """Whether the mirror has everything."""
        return self._sending is None or self._sending.quiet

    def changed(self, unit: Unit) -> None:
        """What the unit holds has changed: nothing more is written to it until it is `mirrored`."""
        if self._sending is not None:
            self._sending.changed(unit)

    def forget(self, units: Iterable[Unit]) -> None:
        """Units that nobody will use again."""
        if self._sending is not None:
            self._sending.forget(units)

    def turn(self) -> bool:
        """Take in what has come, and send what is due; whether anything was done."""
        worked = self._hear()
        if self._sending is not None:
            worked |= self._sending.turn()
        if not self._told and self.quiet:
            self._told = True
            post(self._comm, Filled(), *self._others)
            self._filled(self._mine)
        return worked

    def stop(self) -> None:
        """The generation is over: nobody waits for the mirror any more, and what is not whole here does not count."""
        self._hear()
        self._keeping.stop()
        if self._sending is not None:
            self._sending.stop()

    def _hear(self) -> bool:
        worked = False
        for server, letter in taken(self._comm):
            worked = True
            if isinstance(letter, Sent):
                self._keeping.take(server, letter)
            elif isinstance(letter, Kept):
                if self._sending is not None:
                    self._sending.kept(letter.numbers)
            elif isinstance(letter, Gone):
                self._copies.forget(letter.places)
            else:
                self._filled(server)
        return self._keeping.turn() or worked

    def _filled(self, server: int) -> None:
        self._unfilled.discard(server)
        if not self._unfilled:
            self._copies.filled(self._generation)
