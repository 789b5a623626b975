"""Workers that wait for one another: when none can go on, and what is said then."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from collectives.errors import MismatchError
from mpips import meet
from mpips.talk import STUCK, Talk, Waits, stuck, verdict


def waits(rank, rounds, meeting=0, meetings=0, **needs):
    return Waits(f"rank {rank}: pull of keys {list(needs)}", needs, meeting, rounds, meetings)


def test_two_orders_of_two_keys():
    both = {0: waits(0, {"a": 1, "b": 0}, a=1), 1: waits(1, {"a": 0, "b": 1}, b=1)}
    assert stuck(both)
    assert "rank 0: pull of keys ['a'] (round 1); rank 1: pull of keys ['b'] (round 1)" in verdict(both)


def test_who_has_pushed_is_not_waited_for():
    assert not stuck({0: waits(0, {"a": 1, "b": 0}, a=1), 1: waits(1, {"a": 1, "b": 1}, b=1)})
    assert not stuck({0: waits(0, {"a": 1}, a=1), 1: waits(1, {"a": 1}, a=1)})


def test_all_must_be_stuck_for_any_to_be():
    """Rank 2 waits for what all have pushed: it will go on."""
    three = {0: waits(0, {"a": 1, "b": 0}, a=1), 1: waits(1, {"a": 0, "b": 1}, b=1), 2: waits(2, {"a": 0, "c": 1})}
    assert not stuck(three)
    three[2] = waits(2, {"a": 0, "b": 0, "c": 1}, c=1)
    assert stuck(three)


def test_a_meeting_is_waited_for_too():
    assert stuck({0: waits(0, {"a": 0}, meeting=3, meetings=3), 1: waits(1, {"a": 1}, meetings=2, a=1)})
    assert not stuck({0: waits(0, {"a": 1}, meeting=3, meetings=3), 1: waits(1, {"a": 1}, meetings=2, a=1)})
    assert not stuck({0: waits(0, {}, meeting=3, meetings=3), 1: waits(1, {}, meeting=3, meetings=3)})


class Wire:
    """What two workers send each other, in this process."""

    def __init__(self, rank, inboxes):
        self.rank, self.inboxes = rank, inboxes

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return len(self.inboxes)

    def Dup(self):
        return self

    def Isend(self, what, to, tag):
        self.inboxes[to].append((self.rank, what[0]))
        return MPI.REQUEST_NULL

    def Iprobe(self, source, tag, status):
        if self.inboxes[self.rank]:
            source, data = self.inboxes[self.rank][0]
            status.Set_source(source)
            status.Set_elements(MPI.BYTE, len(data))
        return bool(self.inboxes[self.rank])

    def Recv(self, what, source, tag):
        what[0][:] = self.inboxes[self.rank].pop(0)[1]


def test_who_has_found_that_all_are_stuck_waits_no_more_for_it(monkeypatch):
    """Though it has said again that it waits, before the servers told that its round has failed."""
    inboxes, refused = [[], []], []
    pairs = (("a", "b"), ("b", "a"))
    talks = [
        Talk(
            Wire(rank, inboxes), None, lambda mine=mine, other=other: {mine: 1, other: 0},
            lambda key, count, sentence, event: refused.append(sentence), False, lambda worker: False, 60.0, 0.0,
        )
        for rank, (mine, other) in enumerate(pairs)
    ]  # fmt: skip
    looks = [
        talk.waiting(f"rank {rank}: pull of {mine}", lambda mine=mine: {mine: 1})
        for rank, (talk, (mine, _)) in enumerate(zip(talks, pairs, strict=True))
    ]
    for look in looks * 2:
        look(1.0)
    assert len(set(refused)) == 1 and refused[0].startswith(STUCK)
    inboxes[0].clear()
    inboxes[1].clear()
    monkeypatch.setattr(meet.time, "sleep", lambda seconds: pytest.fail("it waits"))
    talks[1].ended(MismatchError(refused[0]))
