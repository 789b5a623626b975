"""The proof catches schedules that were broken on purpose, and says where."""

from dataclasses import replace

import numpy as np
import pytest

from collectives.schedule.catalog import build
from collectives.schedule.model import NOBODY, ChunkInterval, ScheduleStep, where
from collectives.schedule.proof import ScheduleError, check


def mutated(schedule, change, lane=0, step=0, round_=0):
    """The same schedule with round `round_` of `step` of `lane` changed by change(round, rank)."""
    stage = schedule.lanes[lane].stage

    def broken(rank):
        for index, text in enumerate(stage(rank)):
            if index != step:
                yield text
            else:
                rounds = list(text)
                rounds[round_] = change(rounds[round_], rank)
                yield ScheduleStep(len(rounds), rounds.__getitem__)

    lanes = list(schedule.lanes)
    lanes[lane] = replace(lanes[lane], stage=broken)
    return replace(schedule, lanes=tuple(lanes))


def dropped_step(schedule, step):
    stage = schedule.lanes[0].stage
    without = replace(schedule.lanes[0], stage=lambda rank: (s for i, s in enumerate(stage(rank)) if i != step))
    return replace(schedule, lanes=(without, *schedule.lanes[1:]))


def wrong_partner(r, rank):
    return r._replace(send_to=where(rank == 2, 0, r.send_to))


def partner_outside(r, rank):
    return r._replace(send_to=where(rank == 1, 99, r.send_to))


def silent_sender(r, rank):
    return r._replace(send_to=where(rank == 1, NOBODY, r.send_to))


def deaf_receiver(r, rank):
    return r._replace(receive_from=where(rank == 1, NOBODY, r.receive_from))


def other_chunk(r, rank):
    return r._replace(send=ChunkInterval(where(rank == 3, 0, r.send.start), where(rank == 3, 1, r.send.stop)))


def shorter_send(r, rank):
    return r._replace(send=ChunkInterval(r.send.start, where(rank == 3, r.send.start, r.send.stop)))


def chunk_outside(r, rank):
    shift = where(rank == 0, 100, 0)
    return r._replace(receive=ChunkInterval(r.receive.start + shift, r.receive.stop + shift))


def copied(r, rank):
    return r._replace(add=False)


def added(r, rank):
    return r._replace(add=True)


@pytest.mark.parametrize(
    ("change", "step", "sentence"),
    [
        (wrong_partner, 1, r"lane 0, step 1, round 0: rank 2 sends chunks \[0, 1\) to rank 0, which does not name it"),
        (partner_outside, 0, "rank 1 sends .* to rank 99, which is not another rank"),
        (silent_sender, 2, "step 2, round 0: rank 2 receives .* from rank 1, which does not name it back"),
        (deaf_receiver, 2, "step 2, round 0: rank 0 sends .* to rank 1, which does not name it back"),
        (other_chunk, 0, r"rank 3 sends chunks \[0, 1\) to rank 0, which receives \[2, 3\)"),
        (shorter_send, 3, "step 3, round 0: rank 3 sends"),
        (chunk_outside, 0, r"rank 0 receives chunks \[102, 103\) from rank 3, but the lane has chunks \[0, 4\)"),
        (copied, 0, r"round 0: rank 0 copies chunk 2 from rank 3, which loses the contributions of ranks \[0\]"),
        (added, 3, "step 3, round 0: rank 0 adds chunk 3 from rank 3, which brings a second time .* ranks \\[0\\]"),
    ],
)
def test_a_broken_ring_is_caught_at_its_first_fault(change, step, sentence):
    with pytest.raises(ScheduleError, match=sentence):
        check(mutated(build("allreduce", "ring", 4), change, step=step))


@pytest.mark.parametrize(
    ("kind", "name", "p"), [("allreduce", "ring", 5), ("reduce", "binomial", 6), ("allgather", "bcube", 9)]
)
def test_a_missing_step_is_caught(kind, name, p):
    with pytest.raises(ScheduleError, match="lane 0"):
        check(dropped_step(build(kind, name, p), 0))


def test_the_last_missing_step_names_rank_chunk_and_the_round_that_wrote_it_last():
    fault = r"rank 0 ends without .* ranks \[1\] in chunk 1, last written in step 0, round 0"
    with pytest.raises(ScheduleError, match=fault):
        check(dropped_step(build("allreduce", "ring", 3), 3))


def test_the_lane_of_a_fault_is_named():
    with pytest.raises(ScheduleError, match="lane 1, step 0"):
        check(mutated(build("allreduce", "bcube", 9), copied, lane=1))


def test_two_copies_to_one_place_are_a_race():
    def same_place(r, rank):
        part = ChunkInterval(0, 1)
        return r._replace(send_to=(rank + 2) % 3, send=part, receive_from=(rank - 2) % 3, receive=part)

    with pytest.raises(ScheduleError, match="another round of the step copies over"):
        check(mutated(build("allgather", "direct", 3), same_place, round_=1))


def test_a_send_from_a_place_that_is_copied_over_is_a_race():
    def swap(r, rank):
        whole = ChunkInterval(0, 1)
        return r._replace(send=whole, receive=whole, add=False)

    with pytest.raises(ScheduleError, match="another round of the step copies over"):
        check(mutated(build("allreduce", "recursive_doubling", 2), swap))


def test_sending_what_one_does_not_hold_is_caught():
    schedule = build("broadcast", "binomial", 4)
    stage = schedule.lanes[0].stage
    backwards = replace(schedule.lanes[0], stage=lambda rank: reversed(list(stage(rank))))
    with pytest.raises(ScheduleError, match="rank 3 gets chunk 0 from rank 2, which holds nothing there"):
        check(replace(schedule, lanes=(backwards,)))


def test_faults_beyond_64_ranks_are_found_and_named():
    ring = build("allreduce", "ring", 100)
    with pytest.raises(ScheduleError, match="step 120, round 0: rank 0 adds chunk 78 from rank 99"):
        check(mutated(ring, added, step=120))
    with pytest.raises(ScheduleError, match="rank 0 ends without"):
        check(dropped_step(ring, 197))


def test_an_alltoall_that_swaps_blocks_is_caught():
    def swapped(r, rank):
        start = where(rank == 0, 2, r.send.start)
        return r._replace(send=ChunkInterval(start, start + 1))

    with pytest.raises(ScheduleError, match="rank 1 gets block 2 of rank 0's input"):
        check(mutated(build("alltoall", "direct", 3), swapped))
    with pytest.raises(ScheduleError, match="rank 0 never gets its block"):
        check(dropped_step(build("alltoall", "direct", 3), 0))


def test_a_block_collective_of_other_chunks_is_refused():
    schedule = replace(build("allreduce", "bcube", 4), kind="reduce_scatter")
    with pytest.raises(ScheduleError, match="one lane of p chunks"):
        check(schedule)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(
    ("name", "p"),
    [("direct", 5), ("halving_doubling", 11), ("recursive_doubling", 6), ("bcube", 16), ("multi_ring", 5)],
)
def test_any_single_changed_number_is_caught(name, p, seed):
    """One partner, one interval bound or one `add` anywhere makes the proof fail."""
    rng = np.random.default_rng(seed)
    schedule = build("allreduce", name, p)
    lane = int(rng.integers(len(schedule.lanes)))
    steps = list(schedule.steps(lane, np.arange(p)))
    step = int(rng.integers(len(steps)))
    round_ = int(rng.integers(len(steps[step])))
    text = list(steps[step])[round_].over(p)
    active = np.flatnonzero((text.send_to != NOBODY) & (text.receive_from != NOBODY))
    victim = int(rng.choice(active if len(active) else np.flatnonzero(text.send_to != NOBODY)))
    field = rng.choice(["send_to", "start", "stop", "add"])

    def change(r, rank):
        hit = rank == victim
        if field == "send_to":
            return r._replace(send_to=where(hit, (r.send_to + 1) % p, r.send_to))
        if field == "add":
            return r._replace(add=not r.add)
        moved = {field: getattr(r.send, field) + where(hit, 1, 0)}
        return r._replace(send=r.send._replace(**moved))

    with pytest.raises(ScheduleError):
        check(mutated(schedule, change, lane, step, round_))
