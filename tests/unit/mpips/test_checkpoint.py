"""A checkpoint's file: whole or not at all, whatever ends the program; and a store of one worker, saved and loaded."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import mpips
from collectives.files import ABANDONED_SECONDS
from mpips.store.checkpoint.file import Reader, Tensor, TensorFile, Writer, write
from tests.choice import first

ARRAYS = {
    "a": np.arange(7, dtype=np.float16),
    "empty": np.zeros((0, 3)),
    "one": np.array(3.5),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.arange(5, dtype=np.int8),
    "d": np.ones((2, 3), np.float32),
}


@pytest.fixture
def made():
    """Make a local store; all are closed at the end."""
    stores = []

    def make(**keys):
        stores.append(mpips.create("local"))
        if keys:
            stores[-1].init(list(keys), list(keys.values()))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def trained(made):
    """Make a store with two keys, momentum, and something that compression has kept back."""

    def make():
        rng = np.random.default_rng(1)
        store = made(a=rng.random((1000, 700), np.float32), b=rng.random(3).astype(np.float16))
        store.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
        store.set_optimizer("adam", keys=["b"])
        store.set_gradient_compression({"type": "2bit", "threshold": 0.25})
        push(store, 5, "a")
        push(store, 2, "b")
        return store

    return make


def push(store, times, *names):
    for name in names:
        key = store.worker.keys[name]
        for turn in range(times):
            store.push(name, np.random.default_rng(turn).random(key.shape).astype(key.dtype))


def values(store):
    found = {name: np.empty(key.shape, key.dtype) for name, key in store.worker.keys.items()}
    for name, array in found.items():
        store.pull(name, array)
    return found


def tensors_of(path):
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def same(one, other):
    return one.keys() == other.keys() and all((array == other[name]).all() for name, array in one.items())


def test_any_arrays_in_a_file(tmp_path):
    write(tmp_path / "x", ARRAYS, {"who": "we"})
    with safe_open(tmp_path / "x", framework="numpy") as file:
        assert file.metadata().pop("who") == "we"
        for name, array in ARRAYS.items():
            found = file.get_tensor(name)
            assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
    assert os.listdir(tmp_path) == ["x"]


def test_the_mode_is_that_of_the_file_replaced_or_the_umasks(tmp_path):
    for mask in (0o022, 0o027, 0o077):
        before = os.umask(mask)
        try:
            write(tmp_path / f"{mask}", ARRAYS, {})
            (tmp_path / "x").write_text("old")
            (tmp_path / "x").chmod(0o604)
            write(tmp_path / "x", ARRAYS, {})
        finally:
            os.umask(before)
        assert stat.S_IMODE(os.stat(tmp_path / f"{mask}").st_mode) == 0o666 & ~mask
        assert stat.S_IMODE(os.stat(tmp_path / "x").st_mode) == 0o604


def test_what_cannot_be_written(tmp_path):
    with pytest.raises(OSError, match="not a regular file"):
        Writer("/dev/null")
    with pytest.raises(OSError, match="no folder"):
        Writer(tmp_path / "there" / "x")
    (tmp_path / "x").write_text("old")
    writer = Writer(tmp_path / "x")
    with pytest.raises(ValueError, match="complex64"):
        writer.begin({"a": Tensor(np.dtype(np.complex64), (3,))}, {})
    writer.abandon()
    assert (tmp_path / "x").read_text() == "old" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_store_comes_back_as_it_was(made, trained, tmp_path, wait):
    old, new = trained(), made()
    before = values(old)
    saving = old.save(tmp_path / "x", wait)
    if not wait:
        assert not (tmp_path / "x").exists()
        push(old, 1, "a", "b")  # what comes later changes nothing
        saving.wait()
        old.load(tmp_path / "x")
    new.load(tmp_path / "x")
    assert same(values(new), before)
    new.save(tmp_path / "y")
    assert same(*(tensors_of(tmp_path / name) for name in "xy"))  # states and residuals, too
    new.load(tmp_path / "x")  # into keys that are there
    assert [record.step for record in Reader(tmp_path / "x").header.records] == [5, 2]
    push(old, 3, "a", "b")
    push(new, 3, "a", "b")
    assert same(values(old), values(new))


def test_a_load_waits_for_the_save_that_is_under_way(trained, tmp_path):
    """Header and tensors are both those of the file that is then there."""
    store = trained()
    store.save(tmp_path / "x")
    push(store, 1, "a")
    later = values(store)
    store.save(tmp_path / "x", False)
    push(store, 1, "b")
    store.load(tmp_path / "x")
    assert same(values(store), later)


def test_what_does_not_fit_changes_nothing(made, trained, tmp_path):
    trained().save(tmp_path / "x")
    write(tmp_path / "other", ARRAYS, {})
    for name, value, words in [
        ("c", np.ones(3), "has no key .c."),
        ("b", np.ones(4, np.float16), r"float16\(3,\) in the file and float16\(4,\)"),
    ]:
        store = made(**{name: value})
        with pytest.raises(ValueError, match=words):
            store.load(tmp_path / "x")
        assert same(values(store), {name: value})
    numbered = made()
    numbered.init(3, np.ones(3))
    for store, path, words in [
        (numbered, "x", "no key 3"),
        (made(), "none", "cannot be read"),
        (made(), "other", "not written by save"),
    ]:
        with pytest.raises(ValueError, match=words):
            store.load(tmp_path / path)


def test_integer_keys_have_no_optimizer(made, tmp_path):
    """As in `init`: those of a file, too, that would be made under the store's default optimizer."""
    made(count=np.arange(3), w=np.zeros(2)).save(tmp_path / "x")
    new = made()
    new.set_optimizer("sgd")
    with pytest.raises(ValueError, match=r"key 'count' is int64, and an optimizer needs floats"):
        new.load(tmp_path / "x")
    assert not new.worker.keys
    new = made(w=np.ones(2))
    new.set_optimizer("sgd", keys=["w"])
    new.load(tmp_path / "x")
    assert same(values(new), {"count": np.arange(3), "w": np.zeros(2)})


def edited(source, target, tensors, old="", new=""):
    """A copy of a checkpoint: these tensors in place of the same ones (None: without it), and a word of its header."""
    with safe_open(source, framework="numpy") as file:
        text = file.metadata()["mpips.store"]
    assert old in text
    arrays = {name: array for name, array in (tensors_of(source) | tensors).items() if array is not None}
    write(target, arrays, {"mpips.store": text.replace(old, new, 1)})


@pytest.fixture
def saved(trained, tmp_path):
    """The file of a trained store."""
    trained().save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "tensors, old, new, words",
    [
        ({"value/b": np.ones(2, np.float16)}, "", "", r"'value/b' is F16\(2,\), its header promises F16\(3,\)"),
        ({"value/b": np.ones(3)}, "", "", r"'value/b' is F64\(3,\), its header promises F16"),
        ({"value/b": None}, "", "", "no tensor 'value/b'"),
        ({"state1/b": None}, "", "", "no tensor 'state1/b'"),
        ({"state0/b": np.ones(3)}, "", "", "'state0/b' is F64"),
        ({"residual0/b": None}, "", "", "no tensor 'residual0/b'"),
        ({}, '"step":2', '"step":-2', "key 'b' has step -2"),
        ({}, '"step":2', f'"step":{1 << 63}', "key 'b' has step 9223372036854775808"),
        ({}, '"round":5', '"round":-1', "key 'a' has round -1"),
        ({}, '"float16"', '"float31"', "key 'b' is of float31: a checkpoint holds"),
        ({}, '"key":"b"', '"key":"a"', "names key 'a' twice"),
        ({}, '["float32","float32"]', '["float32"]', "state of key 'b' is float32, and Adam keeps float32, float32"),
        ({}, '{"type":"2bit","threshold":0.25}', "null", "residuals, and no compression"),
    ],
)
def test_a_file_without_what_its_header_promises_changes_nothing(made, saved, tmp_path, tensors, old, new, words):
    edited(saved, tmp_path / "y", tensors, old, new)
    store = made()
    with pytest.raises(ValueError, match=words):
        store.load(tmp_path / "y")
    found = store.worker
    assert not found.keys and not found.groups and found.compressor is None


def test_a_file_cut_short_is_refused(made, saved, tmp_path):
    data, store = saved.read_bytes(), made()
    for length in (0, 5, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "y").write_bytes(data[:length])
        with pytest.raises(ValueError, match="cannot be read"):
            store.load(tmp_path / "y")


@pytest.mark.parametrize(
    "path, words",
    [
        ("/", r"^/ cannot be written: it exists and is not a regular file"),
        ("/no/such/x", r"^/no/such/x cannot be written: there is no folder /no/such: make it first"),
        (f"{__file__}/no/x", r"/no/x cannot be written: .*test_checkpoint.py is not a folder: choose another place"),
        ("", r"^save: path is empty: give the name of a file"),
        (b"x", r"^save: path b'x' is of type bytes: give a str or a Path"),
        (None, r"^save: path None is of type NoneType: give a str or a Path"),
        ("/tmp/\udcff.st", r"^save: path '/tmp/\\udcff.st' has a character that cannot be in it"),
        ("/tmp/\0.st", r"^save: path '/tmp/\\x00.st' has a character"),
    ],
)
def test_a_place_where_no_file_can_be_written(made, path, words):
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        made(a=np.ones(3)).save(path)
    assert "\udcff" not in str(caught.value)  # it travels to the other workers


@pytest.mark.parametrize(
    "path, words",
    [
        ("/", r"^/ cannot be read: it is no regular file: give one that was saved"),
        ("/no/such/x", r"^/no/such/x cannot be read: there is no such file"),
        ("", r"^load: path is empty: give the name of a file"),
        (3, r"^load: path 3 is of type int: give a str or a Path"),
        ("/tmp/\udcff.st", r"^load: path '/tmp/\\udcff.st' has a character that cannot be in it"),
    ],
)
def test_a_place_where_no_file_can_be_read(made, path, words):
    with pytest.raises((ValueError, TypeError), match=words):
        made().load(path)


@mpips.optimizers.register
@dataclass(frozen=True)
class Complex:
    """Keeps a state that no file holds."""

    def init(self, weights):
        return [np.zeros(weights.shape, np.complex64)]

    def update(self, weights, gradient, state, step):
        weights -= gradient


@pytest.mark.parametrize("wait", [True, False])
def test_a_dtype_that_no_file_holds_leaves_what_was_there(made, tmp_path, wait):
    store = made(c=np.ones(3))
    store.save(tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    store.set_optimizer(Complex())
    push(store, 1, "c")
    with pytest.raises(ValueError, match="state of key 'c' is of complex64: a checkpoint holds float64"):
        store.save(tmp_path / "x", wait)
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == before


def test_what_was_kept_back_is_shared_out_where_fewer_load(made, saved, tmp_path):
    """Three have saved, one loads: nothing is lost."""
    more = {
        f"residual{group}/{key}": np.full(size, 2.0**group, np.float32)
        for group in range(3)
        for key, size in (("a", 700_000), ("b", 3))
    }
    edited(saved, tmp_path / "three", more, '"residuals":1', '"residuals":3')
    store = made()
    store.load(tmp_path / "three")
    store.save(tmp_path / "one")
    found = tensors_of(tmp_path / "one")
    assert (found["residual0/a"] == 7).all() and (found["residual0/b"] == 7).all()


SAVES = """
import sys, numpy as np
from mpips.store.checkpoint.file import write
for number in range(10 ** 6):
    write(sys.argv[1], {"a": np.full(200_000, number), "b": np.full(3, number)}, {})
    print(number, flush=True)
"""


@pytest.mark.slow
@first(1, count=[6, 20])
def test_killed_at_any_moment_the_old_or_the_new_one_is_there(tmp_path, count):
    path, rng = tmp_path / "x", np.random.default_rng(7)
    write(path, {"a": np.full(200_000, -1), "b": np.full(3, -1)}, {})
    for _ in range(count):
        process = subprocess.Popen([sys.executable, "-c", SAVES, path], stdout=subprocess.PIPE)
        assert process.stdout.readline()
        time.sleep(rng.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with TensorFile(path) as file:
            file.check_sums(())
            a, b = file.get("a"), file.get("b")
        assert len({*np.unique(a), *np.unique(b)}) == 1
        process.stdout.close()
    time.sleep(ABANDONED_SECONDS)
    write(path, {"a": a}, {})
    assert os.listdir(tmp_path) == ["x"]
