"""To which moment the workers of a fit go back after a death."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mpips.store.runtime.errors import LostError
from mpips.training.batches import Arrays
from mpips.training.checkpoint import Epoch, Position
from mpips.training.rejoin import (
    BEGIN,
    CALLED,
    COUNTED,
    OVER,
    Moment,
    WorkerReport,
    choose_moment,
    order_of_losses,
    with_losses,
)


def moment(step, stage, ended=0):
    return Moment(Position(step=step), stage, ended, 3, [], None)


def report(*moments, ahead=None, stored=None, ranks=None):
    return WorkerReport(ranks or {0: 0}, 0, list(moments), ahead, stored, True, [], [])


ALL = range(3)


def test_a_store_that_updates_says_the_step():
    behind = report(moment(4, COUNTED), moment(4, CALLED), ahead=moment(5, COUNTED), stored=5)
    before = report(moment(4, CALLED), moment(5, COUNTED), moment(5, CALLED), ahead=moment(6, COUNTED), stored=5)
    found = choose_moment([None, before, behind], ALL, stored=True, asynchronous=False)
    assert found == (5, (0, COUNTED), 1)
    assert behind.at(5, (0, COUNTED)) is behind.ahead and before.at(5, (0, COUNTED)).stage == COUNTED


def test_a_step_that_was_undone_is_taken_again():
    told = [report(moment(4, CALLED), moment(5, CALLED), stored=4) for _ in ALL]
    assert choose_moment(told, ALL, True, False)[:2] == (4, (0, CALLED))


def test_the_end_of_an_epoch_comes_after_its_last_step():
    over = report(moment(4, COUNTED), moment(4, CALLED), moment(4, OVER, ended=1), stored=4)
    not_yet = report(moment(4, COUNTED), moment(4, CALLED), stored=4)
    assert choose_moment([over, not_yet], range(2), True, False).place == (0, CALLED)
    assert choose_moment([over, over], range(2), True, False).place == (1, OVER)
    assert over.at(4, (0, CALLED)).stage == CALLED


def test_where_workers_update_the_one_that_is_furthest_counts():
    ready, done = report(moment(4, CALLED), ahead=moment(5, COUNTED)), report(moment(4, CALLED), moment(5, COUNTED))
    assert choose_moment([ready, done, None], ALL, False, False) == (5, (0, COUNTED), 0)
    assert choose_moment([ready, ready, None], ALL, False, False).step == 4


def test_a_client_of_an_asynchronous_store_is_where_all_of_it_have_come():
    ready, computing = report(moment(7, CALLED), ahead=moment(8, COUNTED)), report(moment(7, CALLED))
    assert choose_moment([ready, ready, computing], range(2), True, True).step == 8
    assert choose_moment([ready, ready, computing], ALL, True, True).step == 7
    assert choose_moment([None, None, computing], range(2), True, True) == (7, (0, CALLED), 2)  # all of it are new


def test_what_nobody_knows_is_said():
    with pytest.raises(LostError, match="no worker is left"):
        choose_moment([None, None], range(2), True, False)
    with pytest.raises(LostError, match=r"of step 2, and worker 1 remembers none but its last 2, up to 4"):
        choose_moment(
            [report(moment(2, CALLED), stored=2), report(moment(3, CALLED), moment(4, CALLED), stored=2)],
            range(2),
            True,
            False,
        )
    with pytest.raises(LostError, match="of unlike steps"):
        choose_moment([report(moment(2, CALLED), stored=None)], range(1), True, False)
    assert choose_moment([report(moment(0, BEGIN), stored=0)] * 2, range(2), True, False).place == (0, BEGIN)


def test_a_spare_has_the_row_of_the_worker_whose_place_it_takes():
    here = [report(ranks={2: 0}), None, report(ranks={2: 2}), None]
    assert order_of_losses(here, 2, 4) == [0, 1, 2, 3]
    assert order_of_losses([report(ranks={2: 0}), report(ranks={2: 2, 3: 1})], 2, 3) == [0, 2]
    history = with_losses([Epoch(1, 0.5, 2.0), Epoch(2, 0.5, 3.0)], [[2.0, 4.0], [3.0, 5.0]], 1)
    assert [epoch.loss for epoch in history] == [4.0, 5.0]
    assert with_losses(history, [], 0) == history


@pytest.mark.parametrize("workers, then", [(4, 3), (3, 2), (2, 1)])
def test_the_rest_of_an_epoch_is_dealt_from_the_first_sample_that_no_step_has_used(workers, then):
    x = np.arange(50)
    source, position = Arrays(x, x, 2, seed=3), Position(batches=4)
    order = np.random.default_rng([3, 1]).permutation(50)
    position.deal(2 * workers)
    workers_then = [SimpleNamespace(rank=rank, num_workers=then) for rank in range(then)]
    parts = [list(source.epoch(1, worker, 0, position.dealt)) for worker in workers_then]
    dealt = np.concatenate([np.concatenate([part[step][0] for part in parts]) for step in range(len(parts[0]))])
    rest = order[4 * 2 * workers :]
    np.testing.assert_array_equal(dealt, rest[: len(rest) - len(rest) % (2 * then)])
    position.batches += 2
    position.deal(2 * then)
    assert (position.dealt, position.since) == (8 * workers + 4 * then, 6)
