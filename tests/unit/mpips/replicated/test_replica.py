"""What a worker keeps of a key: sums become the value or update it, and what breaks off is torn."""

from __future__ import annotations

import numpy as np
import pytest

from mpips import RowSparse, optimizers
from mpips.store.keys.key import Key
from mpips.store.replicated.fast import take_from
from mpips.store.replicated.replica import Replica
from mpips.store.replicated.store import CopiedSnapshot


def replica(optimizer: optimizers.Optimizer | None = None, shape: tuple[int, ...] = (4,)) -> Replica:
    key = Key("w", shape, np.dtype(np.float32))
    return Replica(key, np.zeros(key.size, np.float32), optimizer, np.empty)


def sgd(**numbers: float) -> optimizers.Optimizer:
    return optimizers.create("sgd", **{"learning_rate": 0.5, **numbers})


def test_a_sum_in_room_becomes_the_value_without_a_copy():
    one = replica()
    for turn in (1, 2, 3):
        total = one.room()
        total[...] = turn
        one.take(total)
        assert one.value is total and one.key.round == turn and (one.value == turn).all()


def test_a_sum_elsewhere_is_copied():
    one, total = replica(), np.full(4, 7, np.float32)
    one.take(total)
    total[...] = 0
    assert (one.value == 7).all() and one.key.round == 1


def test_an_optimizer_updates():
    one = replica(sgd(momentum=0.9))
    for _ in range(2):
        one.prepare()
        one.take(np.ones(4, np.float32))
    assert np.allclose(one.value, -0.5 - 0.5 * 1.9) and one.step == 2 and one.key.round == 2


def test_the_caller_gets_what_is_stored_after_the_update():
    one, out = replica(sgd()), np.full((2, 2), 3, np.float32)
    one.prepare()
    take_from([one], [out], None)
    assert (out == -1.5).all() and (one.value == -1.5).all()


def test_rows_that_nobody_pushed_stay():
    one = replica(sgd(), (3, 2))
    one.prepare()
    one.take_rows(RowSparse(np.array([1]), np.ones((1, 2), np.float32), (3, 2)))
    assert one.value.tolist() == [0, 0, -0.5, -0.5, 0, 0] and one.step == 1


def test_without_an_optimizer_rows_that_nobody_pushed_become_zero():
    one = replica(None, (3, 2))
    one.value[...] = 9
    one.take_rows(RowSparse(np.array([1]), np.ones((1, 2), np.float32), (3, 2)))
    assert one.value.tolist() == [0, 0, 1, 1, 0, 0]


def test_an_optimizer_that_does_not_do_is_told_before_anything_changes():
    one = Replica(Key("n", (2,), np.dtype(np.int64)), np.zeros(2, np.int64), sgd(), np.empty)
    with pytest.raises(TypeError, match="float"):
        one.prepare()
    assert not one.updating and one.key.round == 0


def test_an_update_that_breaks_off_leaves_it_torn():
    class Broken:
        def init(self, weights: np.ndarray) -> list[np.ndarray]:
            return []

        def update(self, weights: np.ndarray, gradient: np.ndarray, state: optimizers.State, step: int) -> None:
            weights[:2] = 5
            raise KeyboardInterrupt

    one = replica(Broken())
    one.prepare()
    with pytest.raises(KeyboardInterrupt):
        one.take(np.ones(4, np.float32))
    assert one.updating and one.now().round == 0


def test_it_becomes_another_workers():
    one, other = replica(sgd(momentum=0.9)), replica(sgd(momentum=0.9))
    other.prepare()
    other.take(np.ones(4, np.float32))
    there = other.now()
    arrays = one.become(there.round, there.step, [array.dtype.name for array in there.arrays[1:]], False)
    for array, source in zip(arrays, [other.value, *other.state], strict=True):
        array[...] = source
    one.updating = False
    assert one.now()[:2] == there[:2] and (one.value == other.value).all() and (one.state[0] == other.state[0]).all()


def test_state_that_does_not_fit_is_refused_and_nothing_has_changed():
    one = replica(sgd(momentum=0.9))
    one.put_state(3, [np.ones(4, np.float32)])
    with pytest.raises(ValueError, match="does not fit"):
        one.put_state(4, [])
    assert one.step == 3 and (one.state[0] == 1).all()
    one.put_state(0, [])
    assert one.step == 0 and one.state is None


def test_a_snapshot_stays_as_it_was():
    one = replica(sgd(momentum=0.9))
    one.prepare()
    one.take(np.ones(4, np.float32))
    frozen = CopiedSnapshot([one])
    one.take(np.ones(4, np.float32))
    assert frozen.records["w"] == (1, 1, ("float32",))
    read = frozen.read(one.key, -1, 1, 3)
    with pytest.raises(StopIteration) as over:
        next(read)
    assert over.value.value.tolist() == [-0.5, -0.5]


def spread(workers: int = 2, size: int = 5) -> list[Replica]:
    """The same key on workers that have each other's memory."""
    made = [replica(shape=(size,)) for _ in range(workers)]
    cuts = [size * i // workers for i in range(workers + 1)]
    for mine in made:
        mine.share([(cuts[i], cuts[i + 1], one.arrays()) for i, one in enumerate(made) if one is not mine])
    return made


def give_blocks(workers: list[Replica], total: np.ndarray) -> None:
    for i, one in enumerate(workers):
        start, stop = (total.size * (i + j) // len(workers) for j in (0, 1))
        one.block_room()[start:stop] = total[start:stop]
    for one in workers:
        one.take_block()


def test_a_spread_value_is_whole_for_who_asks():
    workers = spread()
    for turn in range(1, 4):
        total = np.arange(5, dtype=np.float32) * turn
        give_blocks(workers, total)
        if turn != 2:
            assert all((one.value == total).all() and one.key.round == turn for one in workers)


def test_who_has_the_whole_serves_who_has_its_block():
    first, second = spread()
    give_blocks([first, second], np.ones(5, np.float32))
    first.room()[...] = 2
    first.take(first.room())
    second.block_room()[2:] = 2
    second.take_block()
    assert (second.value == 2).all() and (first.value == 2).all()


def test_with_an_optimizer_every_worker_keeps_the_whole():
    workers = spread()
    give_blocks(workers, np.ones(5, np.float32))
    for one in workers:
        one.set_optimizer(sgd())
        assert one.block_room() is None
        one.prepare()
    for one in workers:
        one.take(np.ones(5, np.float32))
        assert (one.value == 0.5).all()


def test_who_gives_a_spread_value_gives_all_of_it():
    workers = spread()
    give_blocks(workers, np.arange(5, dtype=np.float32))
    giver, taker = workers
    there = giver.now()
    given, room = (one.become(there.round, 0, None, one is giver)[0] for one in (giver, taker))
    room[...] = given
    assert given.tolist() == [0, 1, 2, 3, 4]
    giver.updating = taker.updating = False
    give_blocks(workers, np.full(5, 7, np.float32))
    assert all((one.value == 7).all() for one in workers)
