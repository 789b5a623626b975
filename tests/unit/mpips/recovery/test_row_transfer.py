"""However rows come to their new servers, they are those of a serial dictionary; what comes wrong is refused."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from collectives.errors import CollectiveError
from collectives.fabric.arena import SparseFile
from mpips.store.keys.row_sums import owners_of
from mpips.tables import journal, messages, mover
from mpips.tables.admission import Seen, seen
from mpips.tables.initial import key_of
from mpips.tables.mover import RowMover, RowsSent
from mpips.tables.plan import RowSource, TablePlan, TablesPlan
from mpips.tables.row_optimizers import ROW_OPTIMIZERS
from tests.mpi.mpips.reference_table import ReferenceTable
from tests.unit.mpips.server.table_workers import IDS, LIVES, Workers, cards_of

ROWS_AT_ONCE = 3
OLD = 100
"""The rank of the first server before."""
NONE_OLD: Any = None
"""New servers, which take nothing over where it lies."""
Mail = dict[int, deque[tuple[int, bytes]]]


class World:
    """A communicator; `mail` holds what is under way, and `most` is the most bytes of this rank that ever were."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self.rank, self.mail, self.most = rank, mail, 0

    def Get_rank(self) -> int:
        return self.rank

    def Isend(self, data: bytes, to: int, tag: int) -> Any:
        self.mail.setdefault(to, deque()).append((self.rank, data))
        under_way = (message for every in self.mail.values() for message in every)
        self.most = max(self.most, sum(len(data) for rank, data in under_way if rank == self.rank))
        return SimpleNamespace(Test=lambda: not self.mail[to])

    def Improbe(self, source: int, tag: int, status: MPI.Status) -> Any:
        if not self.mail.get(self.rank):
            return None
        rank, data = self.mail[self.rank].popleft()
        status.Set_source(rank)
        status.Set_elements(MPI.BYTE, len(data))
        return SimpleNamespace(Recv=lambda into: into[0].__setitem__(slice(None), data))


def push(servers: list[Workers], step: int, ids: list[int], expected: ReferenceTable) -> None:
    """A round, by one worker."""
    where, random = np.array(ids, np.int64), np.random.default_rng(step)
    call, now = {3: "set", 4: "remove"}.get(step % 6, "push"), (step + 1) * 10**6
    rows = [random.standard_normal((len(ids), 3)), *[random.random(len(ids))] * expected.by_score]
    expected.remove([where], now) if call == "remove" else getattr(expected, call)([(where, *rows)], now)
    for number, server in enumerate(servers):
        mine = owners_of(where, len(servers)) == number
        server.contribute(0, call, where[mine], *(array[mine] for array in rows), time=now)


def contents(servers: list[Workers]) -> list[dict[int, list[bytes]]]:
    """Of each table the rows by id, with all that is kept of each."""
    every: list[dict[int, list[bytes]]] = []
    for name in (copy.table for copy in servers[0].tables.describe()):
        every.append({})
        for piece in (piece for one in servers for piece in one.tables.journal(name).pieces(1 << 40)):
            for row, one in enumerate(piece["ids"]):
                assert int(one) not in every[-1]
                every[-1][int(one)] = [piece[kind][row].tobytes() for kind in sorted(piece)]
    return every


def plans_of(cards: list[messages.MakeTable], round_: int, sources: dict[int, Any], old: int) -> list[TablePlan]:
    rounds = dict.fromkeys(range(OLD, OLD + old), round_)
    return [TablePlan(card, round_, round_, False, [round_], rounds, (0, 0), sources) for card in cards]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(sorted(ROW_OPTIMIZERS)),
    LIVES,
    st.lists(st.lists(IDS, unique=True, max_size=12), min_size=2, max_size=9),
)
def test_rows_are_the_same_on_other_servers(
    data: st.DataObject, old: int, new: int, optimizer: str, life: dict[str, Any], rounds: list[list[int]]
) -> None:
    if old != new:  # servers share limits
        life = life | {"limit": 0, "admit": seen(2) if isinstance(life["admit"], Seen) else life["admit"]}
    cards = cards_of("t", key_of(5, "t"), optimizer, life)
    before = [Workers(1, server=(number, old), cards=cards, file=SparseFile()) for number in range(old)]
    expected = ReferenceTable("t", 3, "float64", 0.5, optimizer, 5, **life, servers=old)
    half = len(rounds) // 2
    for step, ids in enumerate(rounds[:half]):
        push(before, step, ids, expected)
    sources = {
        server: [
            RowSource(OLD + owner, OLD + owner, data.draw(st.sampled_from([*range(new + 1)])), data.draw(st.booleans()))
            for owner in (range(old) if old != new else [server])
        ]
        for server in range(new)
    }  # the rank behind the servers is a worker or a spare
    plans, mail = plans_of(cards, half, sources, old), dict[int, Any]()
    after = [Workers(1, server=(number, new), cards=(), file=SparseFile()) for number in range(new)]
    for number, server in enumerate(after):
        server.tables.restore(TablesPlan(plans), NONE_OLD, number)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "PIECE_BYTES", ROWS_AT_ONCE * 60)
        patch.setattr(mover, "UNDER_WAY_BYTES", 500)
        patch.setattr(mover, "LOOK_SECONDS", 0.0)
        worlds = [World(rank, mail) for rank in range(new + 1)]
        moves = [
            RowMover(
                plans,
                world,
                lambda source, name: before[source.owner - OLD].tables.journal(name),  # type: ignore[arg-type]
                after[world.rank].tables if world.rank < new else None,
            )
            for world in worlds
        ]
        for _ in range(500):
            if sum(move.is_over() for move in moves) == len(moves):
                break
        else:
            pytest.fail("rows are still under way")
    assert all(world.most < 500 + new * 700 for world in worlds)
    for server in after:
        server.tables.begin(TablesPlan(plans))
    assert contents(after) == contents(before)
    for step, ids in enumerate(rounds[half:], half):
        push(after, step, ids, expected)
    every = np.unique(np.array([one for ids in rounds for one in ids], np.int64))
    for number, server in enumerate(after):
        ids = every[owners_of(every, new) == number]
        read = server.ask(0, messages.PullRows("t", 0, len(ids), False), ids)
        assert server.said[read].data == expected.pull(ids).tobytes()


def broken(rows: RowsSent, how: str) -> RowsSent:
    if how == "bit":
        return msgspec.structs.replace(rows, arrays=rows.arrays | {"values": bytes(len(rows.arrays["values"]))})
    return msgspec.structs.replace(rows, number=rows.number + 1)


@pytest.mark.parametrize(
    "how, why",
    [
        ("bit", r"rows of table 't', which server rank 100 had, came from rank 1 as piece 0, broken"),
        ("turn", r"came from rank 1 as piece 1, broken or where piece 0 was due: call recover\(\) again"),
        ("place", "table 't': rows of another server have come"),
    ],
)
def test_what_comes_wrong_is_refused(how: str, why: str) -> None:
    cards = cards_of("t", key_of(5, "t"), "adam", {"admit": None, "evict": 0, "limit": 0})
    before = Workers(1, cards=cards, file=SparseFile())
    push([before], 0, [1, 2, 3], ReferenceTable("t", 3, "float64", 0.5, "adam", 5))
    plans, mail = plans_of(cards, 1, {0: [RowSource(OLD, OLD, 1, True)]}, 1), dict[int, Any]()
    RowMover(plans, World(1, mail), lambda source, name: before.tables.journal(name), None).is_over()  # type: ignore[arg-type]
    if how != "place":
        rows = msgspec.msgpack.decode(mail[0][0][1], type=RowsSent)
        mail[0][0] = 1, msgspec.msgpack.encode(broken(rows, how))
    after = Workers(1, server=(0, 2 if how == "place" else 1), cards=(), file=SparseFile())
    after.tables.restore(TablesPlan(plans), NONE_OLD, 0)
    taking = RowMover(plans, World(0, mail), lambda source, name: before.tables.journal(name), after.tables)  # type: ignore[arg-type]
    with pytest.raises(CollectiveError, match=why):
        taking.is_over()
