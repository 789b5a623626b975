"""The dependency tracker: conflicting operations in program order, the rest by priority."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.store.runtime.engine import Tracker

NAMES = st.frozensets(st.sampled_from("abcd"), max_size=2)
OPERATIONS = st.lists(st.tuples(NAMES, NAMES, st.integers(-2, 2)), max_size=12)


class Op:
    def __init__(self, number: int, reads: frozenset[str], mutates: frozenset[str], priority: int) -> None:
        self.number, self.reads, self.mutates, self.priority = number, reads, mutates, priority

    def conflicts(self, other: Op) -> bool:
        return bool(self.mutates & (other.reads | other.mutates) or other.mutates & self.reads)


@given(OPERATIONS, st.randoms(use_true_random=False))
def test_ready_is_what_no_earlier_conflict_holds_back(rows: list, random) -> None:
    """Against the definition, while operations are added and removed in any order that the tracker allows."""
    tracker: Tracker[Op] = Tracker()
    coming = [Op(number, *row) for number, row in enumerate(rows)]
    alive: list[Op] = []
    while coming or alive:
        expected = [op for op in alive if not any(e.conflicts(op) for e in alive if e.number < op.number)]
        assert tracker.ready() == sorted(expected, key=lambda op: (-op.priority, op.number))
        assert len(tracker) == len(alive)
        if coming and (not alive or random.random() < 0.6):
            op = coming.pop(0)
            tracker.add(op, op.reads, op.mutates, op.priority)
            alive.append(op)
        else:
            op = random.choice(expected)
            tracker.remove(op)
            alive.remove(op)
    assert not tracker.ready()


def test_behind_names_those_that_use_what_was_mutated() -> None:
    tracker: Tracker[str] = Tracker()
    tracker.add("write a, b", mutates="ab")
    tracker.add("read a", reads="a")
    tracker.add("write b", mutates="b")
    tracker.add("read c", reads="c")
    assert tracker.behind("write a, b", "ab") == ["read a", "write b"]
    assert tracker.behind("write a, b", "a") == ["read a"]


def test_only_what_is_ready_can_end() -> None:
    tracker: Tracker[str] = Tracker()
    tracker.add("first", mutates="a")
    tracker.add("second", reads="a")
    with pytest.raises(ValueError, match="'second' cannot have ended"):
        tracker.remove("second")
    with pytest.raises(KeyError):
        tracker.remove("third")
