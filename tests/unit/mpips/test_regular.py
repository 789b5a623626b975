"""When a store saves itself: at which push, whatever the order of keys in a step; and the folder of what it saves."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.files import NewFile
from mpips.compression.registry import create as compressor
from mpips.optimizers import SGD, Adam, Groups
from mpips.store.checkpoint import folder as files
from mpips.store.checkpoint.resume import RegularSaves
from mpips.store.keys.key import Key
from mpips.store.worker.restored import Restored


def regular(*keys: str, every: int = 2, step: int = 0, rank: int = 0, asynchronous: bool = False) -> RegularSaves:
    """That of a store with these keys, whose `save` does no more than to go on counting."""
    options = SimpleNamespace(checkpoint="/nowhere", every=every)
    layout = SimpleNamespace(options=options, rank=rank, asynchronous=asynchronous)
    pushed = dict.fromkeys(keys, SimpleNamespace(noun="key"))
    return RegularSaves(SimpleNamespace(layout=layout, pushed=pushed, collections={}), step)  # type: ignore[arg-type]


def push(it: RegularSaves, *names) -> bool:
    """Whether a push of these keys is preceded by a save."""
    key = list(names) if len(names) > 1 else names[0]
    due = it.is_due(key)
    if due:
        it._next = it._after(it._step + it._most)
    it.count(key)
    return due


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_save_comes_before_the_first_push_of_the_next_step(order):
    it = regular("a", "b", "never")
    pushes = [push(it, name) for _ in range(7) for name in order]
    assert [index // 2 for index, due in enumerate(pushes) if due] == [2, 4, 6]
    assert all(index % 2 == 0 for index, due in enumerate(pushes) if due)


def test_workers_with_other_orders_save_after_the_same_step():
    steps = ["abc", "cab", "bca", "acb", "cba", "bac"]
    for shift in range(3):
        it = regular("a", "b", "c", every=1)
        for number in range(6):
            order = steps[(number + shift) % 6]
            assert [push(it, name) for name in order] == [number > 0, False, False]


def test_lists_and_steps_that_a_job_goes_on_from():
    it = regular("a", "b", every=10, step=12)
    dues = [push(it, "a", "b") for _ in range(20)]
    assert [12 + index for index, due in enumerate(dues) if due] == [20, 30]


def test_keys_that_are_pushed_unequally_often_are_not_saved_and_that_is_said_once():
    it = regular("a", "b", every=1)
    for _ in range(3):
        push(it, "a")
    push(it, "b")
    with pytest.warns(RuntimeWarning, match="key 'b' was pushed 1 times, others 3 times"):
        due = push(it, "a")
    assert not due
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        push(it, "b")
        assert not push(it, "a")
        for _ in range(3):
            push(it, "b")
        assert push(it, "a")


def test_in_an_asynchronous_store_worker_0_counts_alone():
    it = regular("a", "b", every=3, asynchronous=True)
    assert [push(it, name) for name in "aabababa"] == [False, False, False, False, False, True, False, False]
    assert not any(push(regular("a", every=1, rank=1, asynchronous=True), "a") for _ in range(4))


def test_after_a_recover_it_counts_from_the_rounds_that_are_left():
    it = regular("a", "b", every=5)
    for _ in range(4):
        push(it, "a", "b")
    it.set_rounds({"a": 3, "b": 3})
    assert [push(it, "a", "b") for _ in range(4)] == [False, True, True, False]  # the save before may be lost
    it.set_rounds({})
    assert [push(it, "a") for _ in range(6)][-1]


def test_who_leaves_saves_no_more():
    it = regular("a", every=1)
    assert it.leave() == ("/nowhere", 1)
    assert not any(push(it, "a") for _ in range(5))


@pytest.mark.parametrize("bad", [[[1], [2]], {}, None])
def test_keys_that_cannot_be_are_left_to_the_push(bad):
    it = regular("a", every=1)
    push(it, "a")
    assert not it.is_due(bad)


# ---- the folder


def test_the_newest_two_stay_and_a_trainers_files_are_not_ours(tmp_path):
    folder = str(tmp_path)
    assert files.newest_step(folder) is None and files.newest_step(folder + "/none") is None
    for step in (5, 10, 123_456_789):
        open(files.path_of(folder, step), "w").close()
    for name in ("step-00000900.store.safetensors", "store-00000011.safetensors.part", "store-7.safetensors", "x"):
        (tmp_path / name).write_text("")
    files.prune(folder)
    assert list(files.steps_in(folder)) == [10, 123_456_789]
    files.clear_parts(folder)
    assert sorted(os.listdir(folder)) == sorted(
        [
            "step-00000900.store.safetensors",
            "store-00000010.safetensors",
            "store-123456789.safetensors",
            "store-7.safetensors",
            "x",
        ]
    )
    (tmp_path / "step-200000000.trainer.safetensors").write_text("")
    assert files.newest_step(folder) == 200_000_000


def test_what_a_kill_left_goes_and_what_another_job_writes_stays(tmp_path):
    left = tmp_path / f"store-00000005.safetensors.{'a' * 16}.part"
    left.write_text("half")
    writing = NewFile(files.path_of(str(tmp_path), 10))
    files.clear_parts(str(tmp_path))
    assert not left.exists() and len(os.listdir(tmp_path)) == 1
    writing.finish()
    assert list(files.steps_in(str(tmp_path))) == [10]


# ---- what is held until the program asks for it


def key(name: str, *shape: int, dtype: str = "float32") -> Key:
    return Key(name, shape, np.dtype(dtype))


def test_keys_of_another_training_are_told():
    held = Restored("d/store-00000003.safetensors", ["w"], saved=True)
    held.check_key(key("w", 3), key("w", 3))
    with pytest.raises(ValueError, match=r"key 'w' is float32\(3,\) in d/store-.* and float64\(4,\) here"):
        held.check_key(key("w", 3), key("w", 4, dtype="float64"))
    with pytest.raises(ValueError, match=r"key 'v' is not in d/store-.*, which has 'w', so it was saved by another"):
        held.check_first_init(["v"])
    held.claim(["w"])
    held.check_first_init(["v"])
    assert not held.names


def test_an_optimizer_is_kept_once_with_the_numbers_that_it_had():
    held = Restored("f", ["a", "b"], Groups(SGD(learning_rate=0.5), {"b": Adam()}), strict=True)
    with pytest.raises(ValueError, match="f has SGD, and this is Adam: give the same"):
        held.unrestored(Adam(), None)
    assert held.unrestored(SGD(learning_rate=0.1), None) == []
    held.claim_optimizers(None)
    assert held.unrestored(SGD(learning_rate=0.1), None) is None
    assert held.unrestored(Adam(), ["b", "a"]) == ["a"]
    held.claim_optimizers(["b", "a"])
    assert held.unrestored(SGD(), ["b", "a"]) == ["b", "a"]


def test_compression_is_kept_where_it_is_the_same():
    same = {"type": "2bit", "threshold": 0.25}
    assert Restored("f", compressor=compressor(same)).claim_compressor(compressor(same))
    other = compressor({"type": "2bit", "threshold": 0.5})
    assert not Restored("f", compressor=compressor(same)).claim_compressor(other)
    assert not Restored().claim_compressor(compressor(same))


def test_after_a_recovery_all_may_be_claimed_until_the_first_push():
    groups = Groups(SGD(learning_rate=0.5))
    held = Restored("f", ["a", "b"], groups, saved=True, strict=True)
    held.claim(["a"])
    again = held.renewed("the store", ["a", "b"], groups, None)
    again.check_first_init(["c"])
    assert again.names == {"a", "b"} and again.unrestored(Adam(), None) is None  # another optimizer is set by all
    assert again.unrestored(SGD(), None) == [] and again.unrestored(SGD(), ["a"]) == []
    once_more = again.renewed("the store", ["a", "b"], groups, None)
    once_more.claim(["a"])
    assert once_more.names == {"b"}
    once_more.pushed()
    assert once_more.names == {"b"} and not once_more.optimizers  # it had not asked for it before
    never = Restored().renewed("the store", ["a"], groups, None)
    assert never.names == {"a"}
    never.pushed()
    assert not never.names
