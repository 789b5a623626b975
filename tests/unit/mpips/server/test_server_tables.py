"""Tables on a server without MPI: who is answered when, in rounds and in an asynchronous store."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.errors import MismatchError
from collectives.fabric.arena import SparseFile
from mpips.store.keys.row_sums import owners_of
from mpips.store.recovery.plan import RecoveryPlan, choose_rounds
from mpips.store.server.service import OldMemory
from mpips.tables import messages
from mpips.tables.files import FilePart, TableRecord, restore
from mpips.tables.initial import key_of
from mpips.tables.journal import Journal
from mpips.tables.messages import COUNTS
from mpips.tables.plan import FoundTables, RowSource, TableEntry, TablePlan, TablesPlan, attached
from mpips.tables.row_optimizers import ROW_OPTIMIZERS
from tests.mpi.mpips.reference_table import ReferenceTable
from tests.unit.mpips.server.table_workers import CALLS, CARD, IDS, LIVES, Workers, cards_of


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 7), st.integers(1, 3), st.sampled_from(sorted(ROW_OPTIMIZERS)), LIVES)
def test_servers_hold_what_a_dictionary_holds(
    data: st.DataObject, count: int, servers: int, optimizer: str, life: dict[str, Any]
) -> None:
    key, random = key_of(5, "t"), np.random.default_rng(3)
    cards = cards_of("t", key, optimizer, life)
    parts = [Workers(count, server=(number, servers), cards=cards) for number in range(servers)]
    expected = ReferenceTable("t", 3, "float64", 0.5, optimizer, 5, **life, servers=servers)
    seconds, before = data.draw(st.permutations(range(1, 10))), np.zeros(0, np.int64)
    for round_ in range(data.draw(st.integers(1, 9))):
        pushes, call, now = [], data.draw(CALLS), seconds[round_] * 10**6  # the first worker's clock is set back, too
        for ids in data.draw(st.lists(st.lists(IDS, unique=True, max_size=8), min_size=count, max_size=count)):
            scores = [random.integers(-3, 3, len(ids)).astype(float)] if life["evict_by"] == "score" else []
            pushes.append((np.array(ids, np.int64), random.standard_normal((len(ids), 3)), *scores))
        if call == "remove":
            expected.remove([ids for ids, *_ in pushes], now)
        else:
            (expected.push if call == "push" else expected.set)(pushes, now)
        for number in data.draw(st.permutations(range(count * servers))):
            worker, server = number % count, number // count
            chosen = owners_of(pushes[worker][0], servers) == server
            mine = [array[chosen] for array in pushes[worker]]
            stamp = 0 if worker else now  # the clocks of other workers do not count
            parts[server].contribute(worker, call, mine[0], *mine[1:], time=stamp or 10**15)
        every = before = np.unique(np.concatenate([before, *(ids for ids, *_ in pushes)]))
        for server, part in enumerate(parts):
            ids = every[owners_of(every, servers) == server]
            read = part.ask(0, messages.PullRows("t", 0, len(ids), False), ids)
            assert part.said[read].data == expected.pull(ids).tobytes()
            has = part.said[part.ask(0, messages.HasRows("t", 0, ids.tobytes()))].data
            assert np.frombuffer(has, bool).tolist() == [one in expected.rows for one in ids.tolist()]
        stats = [part.said[part.ask(0, messages.GetTableStats("t"))] for part in parts]
        assert sum(one.rows for one in stats) == len(expected.rows)
        assert sum(one.evicted for one in stats) == len(expected.evicted)
        assert [sum(one.expired for one in stats), sum(one.excess for one in stats)] == expected.reasons[1:]
        assert sum(one.removed for one in stats) == expected.removed
        assert sum(one.refused for one in stats) == expected.refused


def test_a_round_waits_for_all_workers() -> None:
    workers = Workers(2)
    first = workers.push(0, 1)
    read, before = workers.pull(0, 1), workers.pull(1, 0)
    assert first in workers.said and read not in workers.said and workers.value(before) == 0
    workers.push(1, 10)
    assert workers.value(read) == 11
    assert workers.value(workers.pull(1, 1)) == 11


def test_workers_that_make_different_calls_in_a_round_are_told() -> None:
    workers, ids = Workers(3), np.array([9])
    workers.push(0, 1)
    workers.push(1, 1)
    sentence = "table 't': round 1 is a push on rank 0 and a remove on rank 2: make the same call on all workers"
    with pytest.raises(MismatchError, match=sentence):
        workers.contribute(2, "remove", ids)


def test_a_second_push_waits_for_room() -> None:
    workers = Workers(2)
    asked = [workers.push(0, value) for value in (1, 2, 4)]
    assert asked[0] in workers.said and asked[1] not in workers.said
    workers.push(1, 0)
    assert asked[1] in workers.said and asked[2] not in workers.said
    workers.push(1, 0)
    workers.push(1, 0)
    assert asked[2] in workers.said and workers.value(workers.pull(0, 3)) == 7


def test_a_push_that_was_under_way_when_its_round_was_refused_does_not_count() -> None:
    workers, refused = Workers(2), messages.RefuseRound("t", 1, 1, "no memory", [])
    workers.push(1, 100)
    workers.ask(1, refused)
    late = workers.push(0, 1000)
    assert isinstance(workers.said[late], messages.RoundRefused)
    workers.ask(0, refused)
    for worker, value in ((0, 1), (1, 10)):
        gradients = np.array([-value, 0], np.float32)
        workers.ask(worker, messages.PushRows("t", 1, 1), gradients, np.array([9], np.int64))
    assert workers.value(workers.pull(0, 1)) == 11


def test_who_has_left_is_not_waited_for() -> None:
    workers = Workers(2)
    workers.push(0, 1)
    with pytest.raises(MismatchError, match="table 't': round 1 needs rank 1, which has left the store"):
        workers.tables.left(1)
    other = Workers(2)
    other.tables.left(1)
    with pytest.raises(MismatchError, match="needs rank 1"):
        other.push(0, 1)


def test_a_worker_too_far_ahead_waits() -> None:
    workers = Workers(2, staleness=1)
    asked = [workers.push(0, 1) for _ in range(4)]
    assert [one in workers.said for one in asked] == [True, True, True, False]
    read = workers.pull(0, 2)
    assert read not in workers.said
    workers.push(1, 10)
    assert workers.value(read) == 12 + 1  # the pull sees the third push, which may go on before it
    assert workers.value(workers.pull(1, 1)) == 13
    workers.hear(workers.tables.left(1))
    assert workers.value(workers.pull(0, 4)) == 14


def test_a_worker_that_waits_for_all_holds_nobody_back() -> None:
    workers = Workers(2, staleness=0)
    asked = [workers.push(0, 1) for _ in range(3)]
    assert asked[2] not in workers.said
    workers.hear(workers.tables.meets(1))
    assert asked[2] in workers.said and workers.value(workers.pull(0, 3)) == 3
    workers.hear(workers.tables.meets(0))
    workers.tables.all_met()
    workers.push(0, 1)
    late, read = workers.push(0, 1), workers.pull(0, 4)
    assert late in workers.said and read not in workers.said  # ahead of what worker 1 has pushed since
    workers.push(1, 10)
    assert workers.value(read) == 3 + 1 + 10 + 1


def test_pushes_count_at_once_without_a_bound() -> None:
    workers = Workers(2, staleness=-1)
    for step in range(5):
        assert workers.push(0, 1) in workers.said
        assert workers.value(workers.pull(0, step + 1)) == step + 1


COUNTED = [msgspec.structs.replace(CARD, table="t" + COUNTS, limit=99), msgspec.structs.replace(CARD, seen=3)]
"""A table, of which ids get a row with their third update, behind its counts."""


class Killed(Exception):
    """In the place of a death."""


def planned(servers: dict[int, Workers], layout: Any) -> tuple[list[TablePlan], RecoveryPlan]:
    """The plan of tables that these servers have had, by their ranks, of which all ranks know."""
    copies = [copy for one in servers.values() for copy in one.tables.describe()]
    layout.num_servers, layout.before = len(servers), None
    layout.server_rank = lambda server: 1 + server
    ranks, encode = 1 + len(servers), msgspec.msgpack.encode
    tables = FoundTables(layout, [encode(COUNTED)] * ranks, [encode(copies)] * ranks, [[]] * ranks)
    choice = choose_rounds([], not layout.asynchronous, services=[tables])
    made = tables.plan(choice.rounds)
    return made.tables, RecoveryPlan([], choice, services={"tables": made})


def test_a_table_and_its_counts_recover_at_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    number = int(owners_of(np.array([9]), 2)[0])
    files = {1 + server: SparseFile() for server in range(2)}
    old = {rank: Workers(1, -1, (rank - 1, 2), COUNTED, file) for rank, file in files.items()}
    mine = old[1 + number]
    for _ in range(5):
        old[2 - number].push(0, 1)
    mine.push(0, 1)
    real = Journal.close

    def close_counts_only(journal: Journal, *words: Any) -> None:
        if journal is mine.tables.journal("t"):
            raise Killed
        real(journal, *words)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "close", close_counts_only)
        with pytest.raises(Killed):
            mine.push(0, 1)

    tables, plan = planned(old, SimpleNamespace(asynchronous=True, num_workers=1))
    new, old_memory = Workers(1, -1, (number, 2), ()), cast(OldMemory, None)
    made = TablesPlan([table._replace(sources={0: [RowSource(0, 0, 0, False)]}) for table in tables])
    entries = msgspec.msgpack.decode(mine.tables.ledger_entry(), type=list[TableEntry])
    new.tables.restore(made, old_memory, 0)
    for table, entry in zip(made.tables, entries, strict=True):
        for piece in attached(files[1 + number], entry).pieces(table.rounds[1 + number]):
            new.tables.put_rows(table.card.table, {name: array.tobytes() for name, array in piece.items()})
    new.tables.begin(made)
    assert plan.rounds == {"t": 5} and plan.rounds.torn == ()
    new.push(0, 1)
    assert new.value(new.pull(0, 0)) == 0  # the second update that counts
    new.push(0, 1)
    assert new.value(new.pull(0, 0)) == 1


def test_a_load_that_breaks_off_leaves_a_torn_table() -> None:
    server = Workers(1, cards=COUNTED)
    for _ in range(4):
        server.push(0, 1)
    torn = []

    class Loading:
        """The servers, as rank 0 reaches them; after each request they may die."""

        def ask(self, request: messages.TableRequest) -> Iterator[None]:
            server.ask(0, request)
            _, plan = planned({1: server}, SimpleNamespace(asynchronous=False, num_workers=1))
            torn.append(plan.rounds.torn)
            return iter(())

        def reset(self, table: str, updates: int, time: int) -> Iterator[None]:
            return self.ask(messages.ResetTable(table, updates, time))

        def end_load(self, table: str) -> Iterator[None]:
            return self.ask(messages.EndLoad(table))

    parts = {"": TableRecord(COUNTED[1], 0, 2), "seen_": TableRecord(COUNTED[0], 0, 2)}
    file: Any = None
    assert list(restore(Loading(), [FilePart(parts, file)])) == []  # type: ignore[arg-type]
    assert torn == [("t",), ("t",), ("t",), ()]
