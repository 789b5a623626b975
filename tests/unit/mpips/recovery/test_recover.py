"""Whoever dies or joins, each key holds afterwards what it held at the round that all chose, wherever it lies now."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips import Options
from mpips.optimizers import SGD, Groups
from mpips.store.keys.cutting import Cutting
from mpips.store.keys.key import Key
from mpips.store.keys.sharding import Interval, split
from mpips.store.recovery.membership import Before, Roles, map_ranks
from mpips.store.recovery.memory import Ledger, NodeMemory, UnitMemory, arrays_of_unit, describe_unit
from mpips.store.recovery.plan import Inventory, KeyCard, OwnerInventory, UnitCopy, choose_rounds, make_plan
from mpips.store.recovery.recover import UnitMover, make_units
from mpips.store.recovery.undo import AvailableRound
from mpips.store.roles import Layout
from mpips.store.runtime.errors import LostError
from mpips.store.server.sources import Elements
from mpips.store.server.state import SynchronousState

SHAPES = {"a": (7,), "b": (300, 5), "c": (0,), "d": (1211,)}
MOMENTUM = SGD(0.5, momentum=0.5)


class World:
    """A communicator of one rank; `mail` holds what is under way."""

    def __init__(self, rank, mail):
        self.rank, self.mail, self.coming = rank, mail, []

    def Isend(self, data, to, tag):
        self.mail.setdefault((self.rank, to), deque()).append(data.tobytes())

    def Irecv(self, data, source, tag):
        self.coming.append((data, source))

    def deliver(self):
        for data, source in self.coming:
            data[...] = np.frombuffer(self.mail[source, self.rank].popleft(), np.uint8)


def layout(kind, masters, roles, nodes, rank, mail, before=None):
    options = Options(servers=2, masters=masters, big_array=1000, spares=0)
    world, clients = World(rank, mail), tuple(Interval(*client) for client in roles.clients)
    return Layout(
        kind,
        options,
        rank,
        roles.num_workers,
        roles.num_servers,
        clients,
        nodes,
        world,
        roles.spares,
        before=before,
    )


def old_servers(kind, masters, roles, nodes, optimizer, ahead):
    """Servers that have made two rounds of all keys, and of some units (`ahead`) a third one; and what keys held after
    each, with their momentum."""
    first = layout(kind, masters, roles, nodes, 0, {})
    cutting, cards = Cutting(first, True, False), {server: [] for server in range(roles.num_servers)}
    keys = [Key(name, shape, np.dtype(np.float32)) for name, shape in SHAPES.items()]
    for key in keys:
        cutting.cut(key, [None] * roles.num_servers, cards)
    servers, held = {}, {round_: {} for round_ in range(4)}
    for number, cut in cards.items():
        ledger, groups = Ledger(), Groups(optimizer)
        memory = UnitMemory(ledger)
        state = SynchronousState(optimizers=groups)
        units, _ = memory.make(cut, groups)
        for unit in units:
            unit.stored[...] = np.arange(unit.start, unit.start + unit.stored.size)
            state.create(unit)
        memory.publish(units, b"", 0)
        for round_ in range(1, 4):
            for unit in units:
                if round_ < 3 or unit.number in ahead:
                    for worker in unit.contributors:
                        values = np.full(unit.stored.size, worker + round_, np.float32)
                        state.pushed(unit, unit.position[worker], Elements(values), 0, 0.0)
            while state.work()[0]:
                pass
            for unit in units:
                arrays = unit.stored, *(unit.state or ())
                held[round_].setdefault(unit.key, {})[unit.start] = [array.copy() for array in arrays]
        servers[roles.num_workers + number] = SimpleNamespace(ledger=ledger, units=units)
    return servers, held


def whole(parts):
    """A key's arrays, put together."""
    arrays = [parts[start] for start in sorted(parts)]
    return [np.concatenate(each) for each in zip(*arrays, strict=True)]


def test_a_push_that_one_shard_has_counts_for_all():
    """Its worker does not make it again."""
    roles, nodes, size = Roles(2, 2, 0, ((0, 1), (1, 2))), (0,) * 4, 1211
    before = Before((0, 1, 2, 3), (), 2, 2, nodes, roles.clients, (0, 1))
    said = [Inventory(keys=[KeyCard("d", (size,), "float32")])] * 2
    for server, start, stop, pushes in ((2, 0, 700, (5, 3)), (3, 700, size, (4, 4))):
        copy = UnitCopy("d", start, stop, [AvailableRound(max(pushes), None)], False, [], list(enumerate(pushes)))
        said.append(Inventory([OwnerInventory(server, True, b"", [copy])]))
    for worker, count in enumerate((5, 4)):
        here = layout("dist_async", "one", roles, nodes, worker, {}, before)
        made = make_plan(here, said, choose_rounds(said, False), [None, None])
        assert made.rounds == {"d": count} and [unit.pushes for unit in made.units] == [[5, 4]] * 2


def reader(maps, origin, units):
    """What a rank can read of old units: its own, and those that it has mapped."""

    def read(piece):
        if piece.owner == origin:
            return arrays_of_unit(units[piece.unit], piece.before)
        return maps.arrays_of(piece.owner, piece.unit, piece.before, 1)

    return read


ROLES = Roles(4, 2, 1, tuple(split(Interval(0, 4), 2)))
KINDS = [("dist_sync", "one"), ("mpi_sync", "one"), ("mpi_sync", "all")]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sets(st.integers(0, 6), max_size=3),
    st.sampled_from([None, MOMENTUM]),
    st.sets(st.integers(0, 12)),
    st.sampled_from(["one", "two", "own"]),
    st.integers(0, 1),
    st.booleans(),
)
def test_every_key_is_what_it_was(kind, lost, optimizer, ahead, where, spares, grow):
    see_what_it_was(kind, lost, optimizer, ahead, where, spares, grow)


@pytest.mark.parametrize("ahead", [set(), {0, 3}])
def test_servers_that_stay_put_units_back_by_a_round(ahead):
    see_what_it_was(("dist_sync", "one"), set(), MOMENTUM, ahead, "one", 0, False)


def see_what_it_was(kind, lost, optimizer, ahead, where, spares, grow):
    kind, masters = kind
    roles = ROLES._replace(spares=spares, clients=ROLES.clients if kind != "dist_sync" else split(Interval(0, 4), 4))
    lost = {rank for rank in lost if rank < roles.size}
    nodes = {"one": (0,) * 7, "two": (0, 0, 2, 2, 0, 2, 0), "own": tuple(range(7))}[where][: roles.size]
    new = map_ranks(roles, lost, nodes, grow, kind == "dist_sync")
    if not new.roles.num_servers or all(rank >= 4 for rank in new.origin[: new.roles.num_workers]):
        return
    servers, held = old_servers(kind, masters, roles, nodes, optimizer, ahead)
    before = Before(new.origin, tuple(sorted(lost)), 4, 2, nodes, roles.clients, new.places)
    mail, ranks, said = {}, [], []
    for rank, origin in enumerate(new.origin):
        here = layout(kind, masters, new.roles, tuple(nodes[old] for old in new.origin), rank, mail, before)
        maps = NodeMemory(
            {old: one.ledger.region for old, one in servers.items() if nodes[old] == nodes[origin] and old != origin}
        )
        mine = Inventory(maps.owners(here, 1), maps.ranks)
        if origin in servers:
            units = [describe_unit(unit, False) for unit in servers[origin].units]
            mine.owners.append(OwnerInventory(origin, True, b"", units))
        elif origin < 4:
            mine.keys = [KeyCard(name, shape, "float32") for name, shape in SHAPES.items()]
        ranks.append((here, maps, origin))
        said.append(mine)
    there = {owner.owner for one in said for owner in one.owners}
    if there != set(servers):
        with pytest.raises(LostError, match="start again from a checkpoint"):
            make_plan(ranks[0][0], said, choose_rounds(said, True), [None, None])
        return
    found, filled = {}, []
    for rank, (here, maps, origin) in enumerate(ranks):
        made = make_plan(here, said, choose_rounds(said, True), [None, None])
        old_units = servers[origin].units if origin in servers else []
        units = []
        if here.is_server:
            ledger = servers[origin].ledger if origin in servers else Ledger()
            units, _ = make_units(made, rank, UnitMemory(ledger), Groups(optimizer), old_units)
        filled.append((here, units, UnitMover(made, here, reader(maps, origin, old_units), units, old_units)))
    for here, units, one in filled:
        here.world.deliver()
        one.finish()
        for unit in units:
            found.setdefault(unit.key, {})[unit.start] = [unit.stored, *(unit.state or ())]
            assert unit.round == made.choice.keys[unit.key].round and list(unit.words)[1:] == unit.done
            assert set(unit.contributors) <= set(range(new.roles.num_workers))
            assert unit.step == (0 if optimizer is None else unit.round)  # an optimizer makes one a round
    assert made.choice.step == 2 or set(ahead) >= {unit.number for one in servers.values() for unit in one.units}
    for name in SHAPES:
        arrays, wanted = whole(found[name]), whole(held[made.choice.keys[name].round][name])
        assert len(arrays) == len(wanted) == (1 if optimizer is None else 2)
        assert all(np.array_equal(a, b) for a, b in zip(arrays, wanted, strict=True)), name
    if not lost and not (grow and spares):  # one more member cuts a client's slices anew
        assert all(one.adopted for one in made.units)
