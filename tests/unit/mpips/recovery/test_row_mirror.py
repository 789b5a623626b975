"""A mirror's copy of a table holds what its server holds after each round, whatever is cut off on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from collectives.errors import CollectiveError
from collectives.fabric.arena import SparseFile
from mpips.tables import journal, messages
from mpips.tables import mirror as row_mirror
from mpips.tables.initial import key_of
from mpips.tables.mirror import MirroredTables, RowMirror
from mpips.tables.row_optimizers import ROW_OPTIMIZERS
from tests.unit.mpips.server.table_workers import CALLS, IDS, LIVES, Workers, cards_of


class Pair:
    """Two servers' communicator, as server `rank` has it; `mail` to each."""

    def __init__(self, rank: int, mail: tuple[deque[bytes], deque[bytes]]) -> None:
        self.rank, self.mail, self.nbytes = rank, mail, 0

    def Get_size(self) -> int:
        return 2

    def Isend(self, data: Any, to: int, tag: int) -> Any:
        assert to == 1 - self.rank
        self.mail[to].append(data[0] if isinstance(data, list) else data)
        self.nbytes += len(self.mail[to][-1])
        return MPI.REQUEST_NULL

    def Improbe(self, source: int, tag: int, status: MPI.Status) -> Any:
        if not self.mail[self.rank]:
            return None
        data = self.mail[self.rank].popleft()
        status.Set_source(1 - self.rank)
        status.Set_elements(MPI.BYTE, len(data))
        return SimpleNamespace(Recv=lambda into: into[0].__setitem__(slice(None), data))


class Mirrored:
    """Tables on one server, with a mirror that takes in so much as `turn` lets it."""

    def __init__(self, cards: list[messages.MakeTable]) -> None:
        self.mail: Any = (deque(), deque())
        self.comm: Any = Pair(0, self.mail)
        self.copies = MirroredTables(SparseFile())
        self.sends = RowMirror(self.comm, 1, MirroredTables(SparseFile()), 0)
        self.takes: Any = RowMirror(Pair(1, self.mail), None, self.copies, 0)  # type: ignore[arg-type]
        self.server = Workers(2, cards=cards, file=SparseFile(), mirror=self.sends)
        self.names = [card.table for card in cards]
        self.by_score = cards[-1].evict_by == "score"
        self.until_there()

    def until_there(self) -> None:
        while not self.sends.quiet:
            self.sends.turn()
            self.takes.turn()
        self.server.hear(self.server.tables.take_mirrored())

    def push(self, random: np.random.Generator, ids: list[int], call: str = "push", time: int = 0) -> list[Any]:
        askers = []
        for worker in range(2):
            rows, scores = random.standard_normal((len(ids), 3)), random.standard_normal(len(ids))
            parts = (rows, scores) if self.by_score else (rows,)
            askers.append(self.server.contribute(worker, call, np.array(ids, np.int64), *parts, time=time))
        return askers

    def content(self) -> dict[str, Any]:
        return {name: content(self.server.tables.journal(name)) for name in self.names}

    def copied(self) -> dict[str, dict[int, Any]]:
        """Of each table the rows that the mirror has, by rounds."""
        every = {}
        for name in self.names:
            there = self.copies.journal(name, 0, 2)
            every[name] = {round_: content(there, round_) for round_, *_ in there.available_rounds()}
        return every


def content(there: journal.Journal, round_: int = 1 << 40) -> dict[int, list[bytes]]:
    found: dict[int, list[bytes]] = {}
    for piece in there.pieces(round_):
        for row, one in enumerate(piece["ids"]):
            found[int(one)] = [piece[name][row].tobytes() for name in sorted(piece)]
    return found


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    """Pieces of a few rows, one message at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "PIECE_BYTES", 150)
        patch.setattr(row_mirror, "UNDER_WAY_BYTES", 1)
        yield


PLAIN = {"admit": None, "evict": 0, "limit": 0}
CARDS = cards_of("t", key_of(5, "t"), "adam", PLAIN)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(sorted(ROW_OPTIMIZERS)), LIVES)
def test_the_copy_goes_on_round_by_round_whatever_is_cut_off(
    data: st.DataObject, optimizer: str, life: dict[str, Any]
) -> None:
    one, random = Mirrored(cards_of("t", key_of(5, "t"), optimizer, life)), np.random.default_rng(3)
    before = one.content()
    for round_ in range(1, 7):
        ids = data.draw(st.lists(IDS, unique=True, max_size=8))
        first, last = one.push(random, ids, data.draw(CALLS), round_ * 10**6)
        assert first in one.server.said and last not in one.server.said  # nobody is told of the round yet
        after = one.content()
        while one.sends.turn() | one.takes.turn():
            for name, rounds in one.copied().items():
                assert rounds[round_ - 1] == before[name]
                assert rounds.get(round_, after[name]) == after[name] and max(rounds) <= round_
        one.until_there()
        assert last in one.server.said and all(round_ in rounds for rounds in one.copied().values())
        before = after


def test_a_round_sends_the_rows_that_it_has_changed() -> None:
    one, random = Mirrored(CARDS), np.random.default_rng(3)
    one.push(random, list(range(500)))
    one.until_there()
    before = one.comm.nbytes
    one.push(random, [3, 700])
    one.until_there()
    assert 0 < one.comm.nbytes - before < 2 * 200 + 400


def test_requests_of_a_table_wait_until_the_mirror_has_it() -> None:
    one = Mirrored(CARDS)
    pull, freeze = messages.PullRows("t", 0, 1, False), messages.FreezeTables(0, ["t"])
    assert not one.server.tables.waits(pull)
    one.push(np.random.default_rng(3), [1])
    assert one.server.tables.waits(pull) and not one.server.tables.waits(freeze)
    one.until_there()
    assert not one.server.tables.waits(pull)


def test_a_load_that_breaks_off_leaves_a_torn_copy() -> None:
    one = Mirrored(CARDS)
    one.push(np.random.default_rng(3), [1, 2])
    one.until_there()
    asked = one.server.ask(0, messages.ResetTable("t", 7))
    assert asked not in one.server.said
    one.until_there()
    assert asked in one.server.said and one.copies.journal("t", 0, 2).torn
    one.server.ask(0, messages.EndLoad("t"))
    one.until_there()
    assert not one.copies.journal("t", 0, 2).torn and one.copies.journal("t", 0, 2).available_rounds() == [
        (1, 7, 0, 0, 0, 0, 0, 0)
    ]


def test_copies_stay_until_all_rows_have_come_anew() -> None:
    one, random = Mirrored(CARDS), np.random.default_rng(3)
    one.push(random, [1, 2, 3])
    one.until_there()
    before = one.content()["t"]
    one.push(random, [2, 3, 4, 5])
    one.until_there()
    one.copies.begin({"t": 1})
    assert one.copied() == {"t": {1: before}}
    table = one.server.tables._tables["t"]
    next_one = RowMirror(one.comm, 1, MirroredTables(SparseFile()), 1)
    taking: Any = RowMirror(Pair(1, one.mail), None, one.copies, 1)  # type: ignore[arg-type]
    next_one.begin(table.card, table.rows.capacity, table.journal)
    for _ in range(3):
        next_one.turn()
        taking.turn()
    assert not next_one.quiet and one.copied() == {"t": {1: before}}
    while not next_one.quiet:
        next_one.turn()
        taking.turn()
    one.copies.drop_before(1)
    assert one.copied() == {"t": {2: one.content()["t"]}}
    assert [(held.owner, held.memory) for held in one.copies.describe(4, 2, -9)] == [(4, -9)]
    assert one.copies.describe(4, 3, -9) == []  # the rows of one of three servers are others
    one.copies.begin({"t": 9})
    assert one.copies.describe(4, 2, -9) == []


def test_a_round_out_of_turn_is_refused() -> None:
    one, random = Mirrored(CARDS), np.random.default_rng(3)
    one.push(random, [1])
    one.sends.turn()
    one.mail[1].clear()
    one.push(random, [1])
    one.sends._nbytes = 0
    one.sends.turn()
    with pytest.raises(CollectiveError, match="table 't': round 2 has come to its mirror, where round 1 was due"):
        one.takes.turn()


def test_a_mirror_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Mirrored(CARDS)
    monkeypatch.setattr(row_mirror, "free_memory", lambda: 1 << 20)
    one.push(np.random.default_rng(3), [1])
    one.sends.turn()
    with pytest.raises(CollectiveError, match="table 't': the mirror's machine has no memory for 1 rows of another"):
        one.takes.turn()
