"""Optimizers and compression of a store without servers travel whole."""

from __future__ import annotations

import numpy as np

from mpips import compression, optimizers
from mpips.store.keys.key import label
from mpips.store.replicated.replicas import ReplicaSettings


def test_they_are_taken_over_whole():
    mine, other = ReplicaSettings(), ReplicaSettings()
    mine.set_optimizer(optimizers.create("sgd", learning_rate=0.5), None)
    mine.set_optimizer(optimizers.create("adam"), ["w", 3])
    mine.update_optimizer({"learning_rate": 0.25}, ["w"])
    mine.set_compression(compression.create({"type": "2bit", "threshold": 0.5}))
    other.take(mine.encode(), mine.changes)
    assert (other.groups.default, other.groups.own) == (mine.groups.default, mine.groups.own)
    assert other.residuals.compressor == mine.residuals.compressor and other.changes == 4


def test_residuals_stay_where_the_compressor_is_the_same():
    mine = ReplicaSettings()
    mine.set_compression(compression.create({"type": "fp16"}))
    kept = mine.residuals
    kept.put("w", np.ones(3), np.dtype(np.float32))
    mine.take(mine.encode(), 7)
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
