"""What a worker keeps of a key that rounds alone do not show, and of all keys: optimizers and compression."""

from __future__ import annotations

import numpy as np
import pytest

from mpips import compression, optimizers
from mpips.store.keys.key import Key, label
from mpips.store.replicated.replica import Replica
from mpips.store.replicated.replicas import ReplicaSettings


def replica(optimizer: optimizers.Optimizer | None = None, size: int = 4) -> Replica:
    key = Key("w", (size,), np.dtype(np.float32))
    return Replica(key, np.zeros(key.size, np.float32), optimizer, np.empty)


def sgd(**numbers: float) -> optimizers.Optimizer:
    return optimizers.create("sgd", **{"learning_rate": 0.5, **numbers})


def test_an_optimizer_that_does_not_do_is_told_before_anything_changes():
    one = Replica(Key("n", (2,), np.dtype(np.int64)), np.zeros(2, np.int64), sgd(), np.empty)
    with pytest.raises(TypeError, match="float"):
        one.prepare()
    assert not one.updating and one.key.round == 0


def test_state_that_does_not_fit_is_refused_and_nothing_has_changed():
    one = replica(sgd(momentum=0.9))
    one.put_state(3, [np.ones(4, np.float32)])
    with pytest.raises(ValueError, match="does not fit"):
        one.put_state(4, [])
    assert one.step == 3 and (one.state[0] == 1).all()
    one.put_state(0, [])
    assert one.step == 0 and one.state is None


def test_it_becomes_another_workers():
    one, other = replica(sgd(momentum=0.9)), replica(sgd(momentum=0.9))
    other.prepare()
    other.take_sum(np.ones(4, np.float32))
    there = other.now()
    arrays = one.become(there.round, there.step, [array.dtype.name for array in there.arrays[1:]], False)
    for array, source in zip(arrays, [other.value, *other.state], strict=True):
        array[...] = source
    one.updating = False
    assert one.now()[:2] == there[:2] and (one.value == other.value).all() and (one.state[0] == other.state[0]).all()


def spread(workers: int = 2, size: int = 5) -> list[Replica]:
    """The same key on workers that have each other's memory."""
    made = [replica(size=size) for _ in range(workers)]
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


# ---- optimizers and compression


def test_they_are_taken_over_whole():
    mine, other = ReplicaSettings(), ReplicaSettings()
    mine.set_optimizer(optimizers.create("sgd", learning_rate=0.5), None)
    mine.set_optimizer(optimizers.create("adam"), ["w", 3])
    mine.update_optimizer({"learning_rate": 0.25}, ["w"])
    mine.set_compression(compression.create({"type": "2bit", "threshold": 0.5}))
    other.take_over(mine.encode(), mine.changes)
    assert (other.groups.default, other.groups.own) == (mine.groups.default, mine.groups.own)
    assert other.residuals.compressor == mine.residuals.compressor and other.changes == 4


def test_residuals_stay_where_the_compressor_is_the_same():
    mine = ReplicaSettings()
    mine.set_compression(compression.create({"type": "fp16"}))
    kept = mine.residuals
    kept.put("w", np.ones(3), np.dtype(np.float32))
    mine.take_over(mine.encode(), 7)
    assert mine.residuals is kept and kept.get("w")[0] == 1


def test_a_key_made_anew_has_the_default():
    mine = ReplicaSettings()
    mine.set_optimizer(optimizers.create("adam"), ["w"])
    mine.forget(["w"])
    assert mine.groups.of("w") is None


def test_labels_tell_lists_apart_that_look_alike():
    assert label("push", ["w"]) == "push of key 'w'" and label("push", [1, 2]) == "push of keys 1, 2"
    many = list("abcdefgh")
    assert label("push", many).startswith("push of keys 'a', 'b', 'c', 'd', ... (8 in all")
    assert label("push", many) != label("push", [*many[:-1], "i"])
