"""Tags of messages: `collectives.fabric.requests`."""

from __future__ import annotations

import pytest
from mpi4py import MPI

import collectives
from collectives.communicator import communicator
from collectives.fabric.requests import FIRST_TAG, TAGS, Lanes, Tags, last_tag

LANES = Lanes(MPI.COMM_SELF, None)


def dealt(counts):
    """The tags of plans that are made one after the other, on the same lanes."""
    first = 0
    for count in counts:
        tags = Tags(LANES, first)
        yield tags.take(count, "a plan")
        first += tags.count


def test_plans_have_tags_of_their_own():
    plans = list(dealt([1, 5, 1, 100, 893, 3000, 4000]))
    tags = [tag for plan in plans for tag in plan]
    assert len(set(tags)) == len(tags) == TAGS


def test_no_plan_has_a_tag_twice_where_they_wrap():
    assert all(len(set(plan)) == len(plan) for plan in dealt([7000, 7000, 7000, TAGS]))


def test_one_shot_calls_have_other_tags_than_plans_and_the_same_on_all_ranks():
    ours, theirs = (Tags(LANES).take(9, "allreduce of 3") for _ in range(2))
    planned = {tag for plan in dealt([TAGS]) for tag in plan}
    assert ours == theirs and not planned & set(ours)
    assert Tags(LANES).take(9, "allreduce of 4") != ours


def test_calls_for_many_keys_share_no_tag():
    """Else a rank could take the values of one key for those of another."""
    taken = {Tags(LANES).take(1, f"push of key {key} (allreduce of 3 float32)")[0] for key in range(1000)}
    assert len(taken) == 1000


def test_this_mpi_has_all_tags():
    tags = [*Tags(LANES).take(TAGS, "x"), *Tags(LANES, 3).take(TAGS, "x")]
    assert min(tags) >= FIRST_TAG > 1 and max(tags) < last_tag()


def test_too_many_lanes_are_refused():
    with pytest.raises(ValueError, match="choose fewer rings"):
        Tags(LANES, 0).take(TAGS + 1, "allreduce")


def test_a_plan_that_lives_shares_no_tag_with_a_new_one():
    """There are lanes anew before the tags of the old are dealt again."""
    comm = MPI.COMM_SELF.Dup()
    collectives.allreduce(collectives.empty(1), comm)
    home = communicator(comm)
    used, living = set(), []
    for _ in range(40):
        lanes, first = home.plan_lanes, home.tags_dealt
        living.append(lanes)
        tags = Tags(lanes, first)
        mine = {(id(lanes.comm), tag) for tag in tags.take(1000, "a plan")}
        assert not mine & used
        used |= mine
        home.count_tags(tags.count)
    comm.Free()
