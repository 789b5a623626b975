"""How all ranks of a store begin its next generation together: they say what they have, and then where it lies now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from collectives.errors import CollectiveError
from mpips import compression
from mpips.compression import Compressor
from mpips.optimizers import Groups, decode, decode_numbers
from mpips.store.keys.key import Rounds
from mpips.store.recovery import plan as planning
from mpips.store.recovery.inventory import Inventory
from mpips.store.recovery.plan import Plan
from mpips.store.recovery.settings import decode_settings
from mpips.store.roles import Layout
from mpips.store.runtime.rendezvous import MeetingPlace
from mpips.store.transport import frames
from mpips.store.transport.frames import Change, Created

WHAT = "recover"
REFUSALS = (ValueError, TypeError)


class Placed(msgspec.Struct, array_like=True):
    """Where a server's units lie; and why it refuses the change of settings that the end of the generation
    interrupted."""

    where: Created | None = None
    refusal: str = ""


class Outlook(msgspec.Struct):
    """What all ranks have said, and what follows from it."""

    said: list[Inventory]
    plan: Plan

    @property
    def change(self) -> Change | None:
        """A change of settings that no worker knows to be made everywhere: servers make it once more."""
        begun = max(self.said, key=lambda one: one.changes[0])
        made = max(one.changes[1] for one in self.said)
        if not begun.changes[2] or made >= begun.changes[0]:
            return None
        return frames.decode_request(begun.changes[2])  # type: ignore[return-value]

    def settings(self) -> tuple[Groups, Compressor | None]:
        """Optimizers and compression of a server, before that change."""
        own = (shelf for one in self.said for shelf in one.shelves if not shelf.is_copy)
        shelves = sorted(own, key=lambda shelf: shelf.owner)
        return decode_settings(shelves[0].settings) if shelves else (Groups(), None)

    def after(self, refusals: Sequence[str]) -> tuple[Groups, Compressor | None, tuple[int, int, bytes]]:
        """The same with that change, if the servers have not refused it; and how many changes workers have begun and
        made, with the last one."""
        groups, compressor = self.settings()
        begun, made, last = max((one.changes for one in self.said), key=lambda changes: changes[0])
        change = self.change
        if change is None:
            return groups, compressor, (begun, begun, last)
        if all(refusals):
            return groups, compressor, (made, made, b"")
        if any(refusals):
            raise CollectiveError(f"servers differ: {next(filter(None, refusals))}; others have done it")
        return groups, changed(groups, compressor, change), (begun, begun, last)

    def rounds(self) -> Rounds:
        """At which round keys stand; in an asynchronous store, how many pushes of this worker are in them."""
        found = self.plan.found
        rounds = Rounds({key.name: key.round for key in self.plan.keys})
        rounds.torn = tuple(name for name, chosen in found.keys.items() if chosen.torn)
        rounds.step = found.step
        return rounds


def former(layout: Layout) -> int:
    """The rank that this one had in the generation before; -1 where it was neither worker nor server."""
    before = layout.before
    if before is None:
        return layout.rank
    rank = before.origin[layout.rank]
    return rank if rank < before.num_workers + before.num_servers else -1


def outlook(layout: Layout, generation: MeetingPlace, mine: Inventory, lines: Sequence[Any]) -> Outlook:
    """Learn what all have, and plan. Collective over workers and servers, blocking. See `plan.make`."""
    told = generation.meet(msgspec.msgpack.encode(mine), WHAT, True)
    said = [msgspec.msgpack.decode(data, type=Inventory) for data in told]
    return Outlook(said, planning.make(layout, said, lines))


def place(layout: Layout, generation: MeetingPlace, mine: Placed) -> list[Placed]:
    """What all servers say. Collective over workers and servers, blocking."""
    told = generation.meet(msgspec.msgpack.encode(mine), WHAT, True)
    servers = map(layout.server_rank, range(layout.num_servers))
    return [msgspec.msgpack.decode(told[server], type=Placed) for server in servers]


def changed(groups: Groups, compressor: Compressor | None, change: Change) -> Compressor | None:
    """Make a change of settings in `groups`; the compression after it."""
    if isinstance(change, frames.SetOptimizer):
        groups.set(decode(change.optimizer), change.keys)
    elif isinstance(change, frames.UpdateOptimizer):
        with suppress(*REFUSALS):
            groups.update(decode_numbers(change.numbers), change.keys)
    else:
        return compression.create(change.options)
    return compressor
