"""Tags of messages: all are allowed, and those of pieces, calls and units are never the same."""

from __future__ import annotations

import pytest

from mpips.store.transport import pending
from mpips.store.transport.pending import COMPARE_TAG, UnitNumbers, member_tag, pull_tag, push_tag


def test_tags_are_what_mpi_allows() -> None:
    most = pending.most_units()
    assert most > 16000
    assert push_tag(most - 1) + 1 == pull_tag(most - 1) < max(32767, 2 * most + 16)


def test_pieces_never_have_the_comparison_tag() -> None:
    most = 2 * pending.most_units() + pending.TAG_DATA
    pieces = (0, 1, 7, most // 4, most, 10 * most)
    texts = (b"", b"push of key 'a'", b"push of key 'b'")
    used = [member_tag(piece, call, text) for piece in pieces for call in range(3 * pending.CALLS) for text in texts]
    assert COMPARE_TAG not in used and max(used) <= max(32767, most)


def test_pieces_and_calls_have_tags_of_their_own() -> None:
    calls = pending.CALLS
    assert len({member_tag(piece, call) for piece in range(1000) for call in range(calls)}) == 1000 * calls


def test_calls_of_other_texts_have_other_tags() -> None:
    assert len({member_tag(3, 1, f"push of key {number}".encode()) for number in range(100)}) > 90


def test_numbers_go_on_after_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "most_units", lambda: 4)
    numbers = UnitNumbers([2, 5])
    taken = [numbers.assign("a"), numbers.assign("b")]
    assert min(taken) > 5 and len({push_tag(number) for number in (2, 5, *taken)}) == 4
