"""A server that is killed at any line of a round leaves the rows of a whole round to those who have its file open."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import decode

from collectives.fabric.arena import SparseFile
from mpips.optimizers import encode_numbers
from mpips.tables import messages
from mpips.tables.initial import key_of
from mpips.tables.journal import Journal, RowsRound
from mpips.tables.plan import TableEntry, attached
from mpips.tables.rows import TableRows
from mpips.tables.service import ServerTables
from tests.unit.mpips.tables.cards import card_of

ROUNDS = 5
KILLED_IN = ("tables/rows", "tables/journal", "tables/places", "tables/service")
LINE: Any = object()


class Killed(BaseException):
    """What a server is stopped by where no process ends."""


def push(tables: Tables, round_: int) -> None:
    """Rows that come again, rows that are new, and time for others to go."""
    ids = np.unique(np.random.default_rng(round_).integers(-12, 12, 8) + 5 * round_)
    gradients = np.random.default_rng(9 * round_).standard_normal((len(ids), 3)).astype(np.float32)
    payload = np.zeros(messages.ids_at(len(ids), 12) + ids.nbytes, np.uint8)
    payload[: gradients.nbytes] = gradients.reshape(-1).view(np.uint8)
    payload[-ids.nbytes :] = ids.view(np.uint8)
    call = tables.calls.get(round_, "push")
    request: Any = messages.PushRows("t", len(ids), sets=call == "set", time=round_)
    if call == "remove":
        request, payload = messages.RemoveRows("t", ids.tobytes(), time=round_), payload[:0]
    tables.answer(0, (LINE, round_), request, payload)


class Tables(ServerTables):
    """With a call for each round that is no push."""

    calls: dict[int, str]


def made(evict: int, seen: int, calls: dict[int, str], more: dict[str, Any]) -> Tables:
    tables = Tables(1, None, file=SparseFile(), survives=True)
    tables.calls = calls
    rate = encode_numbers({"learning_rate": 0.1})
    cards = [messages.MakeTable("t", 3, "float32", key_of(0, "t"), 0.5, "adam", rate, evict, seen=seen, **more)]
    if seen:
        one = encode_numbers({"learning_rate": 1.0})
        cards.insert(0, messages.MakeTable("t/seen", 1, "float32", key_of(0, "t"), 0.0, "sgd", one, evict, 1000))
    for card in cards:
        tables.answer(0, (LINE, 0), card)
    return tables


def content(journal: Journal, round_: int) -> dict[int, list[bytes]]:
    """The rows by id, with all that is kept of each."""
    found: dict[int, list[bytes]] = {}
    for piece in journal.pieces(round_):
        for row, one in enumerate(piece["ids"]):
            found[int(one)] = [piece[name][row].tobytes() for name in sorted(piece)]
    return found


def killed_at(tables: Tables, line: int, rounds: range) -> bool:
    """Make rounds until this line is reached; whether it was."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if any(name in frame.f_code.co_filename for name in KILLED_IN):
            left -= event == "line"
            if left < 0:
                raise Killed
            return trace
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for round_ in rounds:
            push(tables, round_)
    except Killed:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "evict, seen, calls, more",
    [
        (0, 0, {}, {}),
        (2, 0, {}, {}),
        (2, 2, {}, {}),
        (0, 0, {4: "set", 5: "remove"}, {"limit": 9, "evict_by": "count"}),
        (2, 2, {4: "remove", 5: "set"}, {"evict_after": 3}),
    ],
)
def test_rows_of_a_whole_round_are_there_wherever_it_is_killed(
    evict: int, seen: int, calls: dict[int, str], more: dict[str, Any]
) -> None:
    names = ["t/seen", "t"] if seen else ["t"]
    undisturbed, contents, counts = (
        made(evict, seen, calls, more),
        dict[tuple[str, int], Any](),
        dict[tuple[str, int], Any](),
    )
    for round_ in range(1, ROUNDS + 1):
        push(undisturbed, round_)
        for name in names:
            contents[name, round_] = content(undisturbed.journal(name), round_)
            counts[name, round_] = undisturbed.journal(name).available_rounds()[0]
    line, went_back, step = 0, set(), 7
    while True:
        tables = made(evict, seen, calls, more)
        for round_ in range(1, ROUNDS - 1):
            push(tables, round_)
        entries = {entry.card.table: entry for entry in decode(tables.ledger_entry(), type=list[TableEntry])}
        if not killed_at(tables, line, range(ROUNDS - 1, ROUNDS + 1)):
            break
        for name in names:
            there = _seen_from_outside(tables, entries[name])
            rounds = there.available_rounds()
            assert not there.torn and rounds[0].round in range(ROUNDS - 2, ROUNDS + 1)
            for available in rounds:
                number = available.round
                assert available == counts[name, number] and there.pushes_in(rounds[0].round) == [rounds[0].round]
                assert content(there, number) == contents[name, number], (line, name, number)
        rows = tables._tables["t"].rows  # as another generation of the same process takes them
        oldest = rows.journal.available_rounds()[-1][0]
        rows.go_to(rows.journal, oldest)
        went_back.add(oldest)
        assert content(rows.journal, oldest) == contents["t", oldest]
        line += step
    assert went_back >= {ROUNDS - 2, ROUNDS - 1}


def test_rows_of_an_undone_round_leave_nothing_to_those_that_get_their_places() -> None:
    def update(rows: TableRows, step: int, *ids: int) -> None:
        rows.journal.open()
        rows.update(np.array(ids), np.full((len(ids), 2), step, np.float32), step)
        rows.journal.close((step, 0, 0, 0, 0, 0, 0), [step])

    found = []
    for undone in ((), (3, 4, 5)):
        rows = TableRows(card_of(2, "float32", "adam", rate=0.1), file=SparseFile(), survives=True, workers=1)
        update(rows, 1, 1, 2)
        if undone:
            update(rows, 2, *undone)
            rows.go_to(rows.journal, 1)
            rows.begin(RowsRound(1, 1, 0, 0), [1], False)
        for step in (2, 3):
            update(rows, step, 2, 6, 7)
        found.append(rows.pull(np.arange(9)).tobytes())
    assert found[0] == found[1]


def _seen_from_outside(tables: ServerTables, entry: TableEntry) -> Journal:
    return attached(SparseFile.opened(tables._file.region), entry)
