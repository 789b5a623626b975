"""A checkpoint's file: whole or not at all, whatever ends the program; and a store of one worker, saved and loaded."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from collectives.fabric.tasks import nothing
from collectives.files import ABANDONED_SECONDS
from mpips import Options, compression, optimizers
from mpips.store.checkpoint.file import Reader, Tensor, TensorFile, Writer, write
from mpips.store.checkpoint.load import give_back_residuals, load
from mpips.store.checkpoint.save import save
from mpips.store.keys.key import Key
from mpips.store.keys.sharding import Interval
from mpips.store.worker.interface import Frozen
from tests.choice import first

ARRAYS = {
    "a": np.arange(7, dtype=np.float16), "empty": np.zeros((0, 3)), "one": np.array(3.5),
    "b": np.arange(4).astype(ml_dtypes.bfloat16), "c": np.arange(5, dtype=np.int8), "d": np.ones((2, 3), np.float32),
}  # fmt: skip


class World:
    """A layout of one worker alone."""

    def __init__(self, kind="local"):
        self.kind, self.options, self.rank, self.num_workers, self.num_servers = kind, Options(), 0, 1, 0
        self.clients, self.asynchronous, self.workers = (Interval(0, 1),), False, None


class Copy:
    def __init__(self, backend, keys):
        self.records = {}
        self.arrays = {}
        for key in keys:
            step, state = backend.kept.get(key.name, (0, []))
            self.arrays[key.name] = [array.reshape(-1).copy() for array in (backend.values[key.name], *state)]
            self.records[key.name] = Frozen(key.round, step, tuple(array.dtype.name for array in state))
        self.released = False

    def read(self, key, slot, start, stop):
        yield False
        return self.arrays[key.name][slot + 1][start:stop]

    def release(self):
        yield False
        self.released = True


class Backend:
    """Values and states in dicts."""

    def __init__(self):
        self.values, self.kept, self.rest = {}, {}, {}
        self.stored = self

    def snapshot(self, keys):
        yield from nothing()
        self.last = Copy(self, keys)
        return self.last

    def init(self, keys, values):
        yield from nothing()
        self.values.update((key.name, value.reshape(-1).copy()) for key, value in zip(keys, values))

    def put(self, keys, values):
        return self.init(keys, values)

    def set_optimizer(self, optimizer, keys):
        yield from nothing()

    def set_compression(self, options, compressor):
        yield from nothing()

    def put_states(self, keys, states):
        yield from nothing()
        self.kept.update((name, kept) for name, kept in states.items() if kept[0])

    def residuals(self, keys):
        yield from nothing()
        return np.concatenate([self.rest[key.name] for key in keys]).astype(np.float64)

    def put_residuals(self, keys, values):
        yield from nothing()
        self.rest.update((key.name, value) for key, value in zip(keys, values))


class Handle:
    """What was started; it goes on in `test`."""

    def __init__(self, task):
        self.task, self.error, self.done = task, None, False

    def test(self):
        try:
            next(self.task)
        except StopIteration:
            self.done = True
        return self.done

    def wait(self):
        while not self.test():
            pass


class Store:
    """A store of one worker, as `save` and `load` see it; what is started goes on in `test` and `wait`."""

    def __init__(self):
        self.layout, self.generation = World(), SimpleNamespace(number=0, over=None)
        self.backend, self.keys = Backend(), {}
        self.groups, self.compressor, self.saving = optimizers.Groups(), None, None

    def finish(self):
        pass

    def agree(self, what, items=(), refusal=None, noun="key", data=b""):
        if refusal is not None:
            raise refusal
        return [data]

    settled = agree

    def run(self, what, task):
        while True:
            try:
                next(task)
            except StopIteration as stop:
                return stop.value

    def start(self, what, task):
        return Handle(task)

    def add(self, keys):
        self.keys.update((key.name, key) for key in keys)

    def make(self, name, value, step=0, state=()):
        self.add([Key(name, value.shape, value.dtype)])
        self.backend.values[name] = value.reshape(-1).copy()
        self.backend.kept[name] = step, list(state)


def trained():
    """A store with two keys, momentum, and something that compression kept back."""
    store = Store()
    store.groups = optimizers.Groups(optimizers.create("sgd", learning_rate=0.1, momentum=0.9))
    store.groups.set(optimizers.create("adam"), ["b"])
    store.compressor = compression.create({"type": "2bit", "threshold": 0.25})
    rng = np.random.default_rng(1)
    store.make("a", rng.random((1000, 700), np.float32), 5, [rng.random(700_000, np.float32)])
    store.make("b", rng.random(3).astype(np.float16), 2, [rng.random(3, np.float32), rng.random(3, np.float32)])
    store.backend.rest = {name: rng.random(key.size, np.float32) for name, key in store.keys.items()}
    return store


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
    with pytest.raises(OSError, match="no regular file"):
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
def test_a_store_comes_back_as_it_was(tmp_path, wait):
    old, new = trained(), Store()
    saving = save(old, tmp_path / "x", wait)
    if not wait:
        assert not (tmp_path / "x").exists()
        values = {name: value.copy() for name, value in old.backend.values.items()}
        for value in old.backend.values.values():
            value[...] = 0  # what comes later changes nothing
        old.backend.values, _ = values, saving.wait()
    assert old.backend.last.released
    load(new, tmp_path / "x")
    assert list(new.keys) == ["a", "b"] and (new.groups.default, new.groups.own) == (old.groups.default, old.groups.own)
    assert new.compressor == old.compressor
    for name, key in old.keys.items():
        assert new.keys[name].shape == key.shape and new.keys[name].dtype == key.dtype
        assert (new.backend.values[name] == old.backend.values[name]).all()
        assert (new.backend.rest[name] == old.backend.rest[name]).all()
        step, state = old.backend.kept[name]
        assert new.backend.kept[name][0] == step
        assert all((a == b).all() for a, b in zip(new.backend.kept[name][1], state, strict=True))
    load(new, tmp_path / "x")  # into keys that are there
    assert [record.step for record in Reader(tmp_path / "x").header.records] == [5, 2]


def test_a_load_waits_for_the_save_that_is_under_way(tmp_path):
    """Header and tensors are both those of the file that is then there."""
    save(trained(), tmp_path / "x", True)
    old = trained()
    old.make("a", np.ones(4, np.float32), 7, [np.ones(4, np.float32)])
    old.backend.rest["a"] = np.zeros(4, np.float32)
    store = Store()
    store.saving = save(old, tmp_path / "x", False)
    load(store, tmp_path / "x")
    assert store.keys["a"].shape == (4,) and store.backend.kept["a"][0] == 7


def test_what_does_not_fit_changes_nothing(tmp_path):
    save(trained(), tmp_path / "x", True)
    write(tmp_path / "other", ARRAYS, {})
    for name, value, words in [
        ("c", np.ones(3), "has no key .c."),
        ("b", np.ones(4, np.float16), r"float16\(3,\) in the file and float16\(4,\)"),
        (3, np.ones(3), "no key 3"),
    ]:  # fmt: skip
        store = Store()
        store.make(name, value)
        with pytest.raises(ValueError, match=words):
            load(store, tmp_path / "x")
        assert list(store.keys) == [name] and (store.backend.values[name] == value).all()
    for name, words in [("none", "cannot be read"), ("other", "not written by save")]:
        with pytest.raises(ValueError, match=words):
            load(Store(), tmp_path / name)


def test_integer_keys_have_no_optimizer(tmp_path):
    """As in `init`: those of a file, too, that would be made under the store's default optimizer."""
    old, new = Store(), Store()
    old.make("count", np.arange(3))
    save(old, tmp_path / "x", True)
    new.groups = optimizers.Groups(optimizers.create("sgd"))
    with pytest.raises(ValueError, match=r"key 'count' is int64, and an optimizer needs floats"):
        load(new, tmp_path / "x")
    assert not new.keys
    new.groups = optimizers.Groups(own={"w": optimizers.create("sgd")})
    load(new, tmp_path / "x")
    assert (new.backend.values["count"] == np.arange(3)).all()


def edited(source, target, tensors, old="", new=""):
    """A copy of a checkpoint: these tensors in place of the same ones (None: without it), and a word of its header."""
    with safe_open(source, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()} | tensors  # noqa: SIM118
        text = file.metadata()["mpips.store"]
    assert old in text
    arrays = {name: array for name, array in arrays.items() if array is not None}
    write(target, arrays, {"mpips.store": text.replace(old, new, 1)})


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
        ({}, '"round":0', '"round":-1', "key 'a' has round -1"),
        ({}, '"float16"', '"float31"', "key 'b' is of float31: a checkpoint holds"),
        ({}, '"key":"b"', '"key":"a"', "names key 'a' twice"),
        ({}, '["float32","float32"]', '["float32"]', "state of key 'b' is float32, and Adam keeps float32, float32"),
        ({}, '{"type":"2bit","threshold":0.25}', "null", "residuals, and no compression"),
    ],
)
def test_a_file_without_what_its_header_promises_changes_nothing(tmp_path, tensors, old, new, words):
    save(trained(), tmp_path / "x", True)
    edited(tmp_path / "x", tmp_path / "y", tensors, old, new)
    store = Store()
    with pytest.raises(ValueError, match=words):
        load(store, tmp_path / "y")
    assert not store.keys and not store.backend.values and not store.groups and store.compressor is None


def test_a_file_cut_short_is_refused(tmp_path):
    save(trained(), tmp_path / "x", True)
    data = (tmp_path / "x").read_bytes()
    for length in (0, 5, 100, len(data) // 2, len(data) - 1):
        (tmp_path / "y").write_bytes(data[:length])
        with pytest.raises(ValueError, match="cannot be read"):
            load(Store(), tmp_path / "y")


@pytest.mark.parametrize(
    "path, words",
    [
        ("/", r"^/ cannot be written: it is there and no regular file"),
        ("/no/such/x", r"^/no/such/x cannot be written: there is no folder /no/such: make it first"),
        (f"{__file__}/no/x", r"/no/x cannot be written: .*test_checkpoint.py is no folder: choose another place"),
        ("", r"^save: path is empty: give the name of a file"),
        (b"x", r"^save: path b'x' is of type bytes: give a str or a Path"),
        (None, r"^save: path None is of type NoneType: give a str or a Path"),
        ("/tmp/\udcff.st", r"^save: path '/tmp/\\udcff.st' has a character that cannot be in it"),
        ("/tmp/\0.st", r"^save: path '/tmp/\\x00.st' has a character"),
    ],
)
def test_a_place_where_no_file_can_be_written(path, words):
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        save(trained(), path, True)
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
def test_a_place_where_no_file_can_be_read(path, words):
    with pytest.raises((ValueError, TypeError), match=words):
        load(Store(), path)


@pytest.mark.parametrize("wait", [True, False])
def test_a_dtype_that_no_file_holds_leaves_what_was_there(tmp_path, wait):
    store = trained()
    save(store, tmp_path / "x", True)
    before = (tmp_path / "x").read_bytes()
    store.make("c", np.ones(3), 1, [np.ones(3, np.complex64)])
    store.backend.rest["c"] = np.zeros(3)
    with pytest.raises(ValueError, match="state of key 'c' is of complex64: a checkpoint holds float64"):
        save(store, tmp_path / "x", wait)
    assert store.backend.last.released
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == before


def test_what_was_kept_back_is_shared_out_where_fewer_load():
    """Three have saved, two load: nothing is lost."""
    saved = [[np.full(4, value, np.float32)] for value in (1, 2, 4)]
    layout = SimpleNamespace(kind="dist_sync", num_servers=1, num_workers=1, rank=0, workers=None)
    backend = Backend()
    for _ in give_back_residuals(layout, backend, [Key("w", (4,), np.dtype(np.float32))], saved, 3):
        pass
    assert (backend.rest["w"] == 7).all()


SAVES = """
import sys, numpy as np
from mpips.store.checkpoint.file import write
for number in range(10 ** 6):
    write(sys.argv[1], {"a": np.full(200_000, number), "b": np.full(3, number)}, {})
    print(number, flush=True)
"""


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
            file.see_sums(())
            a, b = file.get("a"), file.get("b")
        assert len({*np.unique(a), *np.unique(b)}) == 1
        process.stdout.close()
    time.sleep(ABANDONED_SECONDS)
    write(path, {"a": a}, {})
    assert os.listdir(tmp_path) == ["x"]
