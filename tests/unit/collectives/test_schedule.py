"""Cuts, offsets, and the two readings of one text: for one rank and for all."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.schedule.catalog import build, names, serves
from collectives.schedule.model import KINDS, NOBODY, Lane, Schedule, cut


@given(n=st.integers(0, 10**6), parts=st.integers(1, 300))
def test_a_cut_covers_everything_in_sizes_that_differ_by_one_at_most(n, parts):
    bounds = cut(n, parts, np.arange(parts + 1))
    sizes = np.diff(bounds)
    assert bounds[0] == 0
    assert bounds[-1] == n
    assert sizes.min() >= 0 and sizes.max() - sizes.min() <= 1
    assert [cut(n, parts, part) for part in (0, parts // 2, parts)] == list(bounds[[0, parts // 2, parts]])


@given(n=st.integers(0, 10**5), p=st.integers(1, 12), rings=st.integers(1, 4))
def test_the_chunks_of_all_lanes_cover_the_vector_once(n, p, rings):
    schedule = build("allreduce", "multi_ring", p, rings=rings)
    end = 0
    for lane in range(rings):
        offsets = schedule.offsets(n, lane)
        assert offsets[0] == end
        assert len(offsets) == p + 1
        assert (np.diff(offsets) >= 0).all()
        end = offsets[-1]
    assert end == n


def test_offsets_pass_two_to_the_thirty_first():
    offsets = build("allreduce", "ring", 3).offsets(3 * 2**33, 0)
    assert list(offsets) == [0, 2**33, 2**34, 3 * 2**33]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [1, 2, 5, 8, 9])
def test_one_rank_and_all_ranks_read_the_same_text(kind, p):
    for name in names(kind):
        written = f"{name}(local=1)" if name == "hierarchical" else name
        if serves(kind, written, p):
            continue
        schedule = build(kind, written, p, root=p // 2)
        for lane in range(len(schedule.lanes)):
            everyone = [[r.over(p) for r in step] for step in schedule.steps(lane, np.arange(p))]
            for rank in range(p):
                alone = [list(step) for step in schedule.steps(lane, rank)]
                assert [len(step) for step in alone] == [len(step) for step in everyone]
                for mine, ours in zip(chain(*alone), chain(*everyone)):
                    assert mine.add == ours.add
                    assert (mine.send_to, mine.receive_from) == (ours.send_to[rank], ours.receive_from[rank])
                    if mine.send_to != NOBODY:
                        assert mine.send == (ours.send.start[rank], ours.send.stop[rank])
                    if mine.receive_from != NOBODY:
                        assert mine.receive == (ours.receive.start[rank], ours.receive.stop[rank])


def test_a_program_leaves_out_what_a_rank_has_no_part_in():
    program = build("broadcast", "binomial", 6).program(5)
    (steps,) = program
    assert [(step.number, len(step.rounds)) for step in steps] == [(2, 1)]
    assert steps[0].rounds[0].receive_from == 4
    assert steps[0].rounds[0].send_to == NOBODY


def test_a_root_turns_the_ranks():
    schedule = build("broadcast", "binomial", 4, root=3)
    assert [r.send_to for step in schedule.program(3)[0] for r in step.rounds] == [1, 0]


@pytest.mark.parametrize(("kind", "p", "root"), [("gather", 2, 0), ("reduce", 0, 0), ("reduce", 2, 2)])
def test_a_schedule_of_no_kind_or_size_or_root_is_refused(kind, p, root):
    with pytest.raises(ValueError, match=r"choose one of|need p"):
        Schedule(kind, "x", p, (Lane(1, lambda rank: iter(())),), root)
