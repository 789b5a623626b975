"""To which moment the workers of a fit go back after a death."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mpips.store.runtime.errors import LostError
from mpips.training.batches import Arrays
from mpips.training.checkpoint import Epoch, Position
from mpips.training.rejoin import BEGIN, COUNTED, OVER, TOLD, Mark, Word, agreed, rows_of, with_losses


def mark(step, stage, ended=0):
    return Mark(Position(step=step), stage, ended, 3, [], None)


def word(*marks, ahead=None, stored=None, ranks=None):
    return Word(ranks or {0: 0}, 0, list(marks), ahead, stored, True, [], [])


ALL = range(3)


def test_a_store_that_updates_says_the_step():
    behind = word(mark(4, COUNTED), mark(4, TOLD), ahead=mark(5, COUNTED), stored=5)
    before = word(mark(4, TOLD), mark(5, COUNTED), mark(5, TOLD), ahead=mark(6, COUNTED), stored=5)
    found = agreed([None, before, behind], ALL, stored=True, asynchronous=False)
    assert found == (5, (0, COUNTED), 1)
    assert behind.at(5, (0, COUNTED)) is behind.ahead and before.at(5, (0, COUNTED)).stage == COUNTED


def test_a_step_that_was_undone_is_taken_again():
    told = [word(mark(4, TOLD), mark(5, TOLD), stored=4) for _ in ALL]
    assert agreed(told, ALL, True, False)[:2] == (4, (0, TOLD))


def test_the_end_of_an_epoch_comes_after_its_last_step():
    over = word(mark(4, COUNTED), mark(4, TOLD), mark(4, OVER, ended=1), stored=4)
    not_yet = word(mark(4, COUNTED), mark(4, TOLD), stored=4)
    assert agreed([over, not_yet], range(2), True, False).place == (0, TOLD)
    assert agreed([over, over], range(2), True, False).place == (1, OVER)
    assert over.at(4, (0, TOLD)).stage == TOLD


def test_where_workers_update_the_one_that_is_furthest_counts():
    ready, done = word(mark(4, TOLD), ahead=mark(5, COUNTED)), word(mark(4, TOLD), mark(5, COUNTED))
    assert agreed([ready, done, None], ALL, False, False) == (5, (0, COUNTED), 0)
    assert agreed([ready, ready, None], ALL, False, False).step == 4


def test_a_client_of_an_asynchronous_store_is_where_all_of_it_have_come():
    ready, computing = word(mark(7, TOLD), ahead=mark(8, COUNTED)), word(mark(7, TOLD))
    assert agreed([ready, ready, computing], range(2), True, True).step == 8
    assert agreed([ready, ready, computing], ALL, True, True).step == 7
    assert agreed([None, None, computing], range(2), True, True) == (7, (0, TOLD), 2)  # all of it are new


def test_what_nobody_knows_is_said():
    with pytest.raises(LostError, match="no worker is left"):
        agreed([None, None], range(2), True, False)
    with pytest.raises(LostError, match=r"of step 2, and worker 1 remembers none but its last 2, up to 4"):
        agreed([word(mark(2, TOLD), stored=2), word(mark(3, TOLD), mark(4, TOLD), stored=2)], range(2), True, False)
    with pytest.raises(LostError, match="of unlike steps"):
        agreed([word(mark(2, TOLD), stored=None)], range(1), True, False)
    assert agreed([word(mark(0, BEGIN), stored=0)] * 2, range(2), True, False).place == (0, BEGIN)


def test_a_spare_has_the_row_of_the_worker_whose_place_it_takes():
    here = [word(ranks={2: 0}), None, word(ranks={2: 2}), None]
    assert rows_of(here, 2, 4) == [0, 1, 2, 3]
    assert rows_of([word(ranks={2: 0}), word(ranks={2: 2, 3: 1})], 2, 3) == [0, 2]
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
