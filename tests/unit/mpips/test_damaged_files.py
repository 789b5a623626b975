"""Damaged files: each flipped bit of a checkpoint is noticed, and nothing that stands in a file is a crash."""

from __future__ import annotations

import random
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

import mpips
from collectives import CollectiveError
from collectives.call import Call, find_reduction
from collectives.schedule import catalog
from collectives.schedule.catalog import check_algorithm
from collectives.simulator.simulate import predict_seconds
from collectives.tuner import table
from collectives.tuner.table import EVERYTHING, Range, Slots
from mpips import chaos, overlap
from mpips.mlp import MLP, Mesh, SyntheticSource, load, load_checkpoint, save_checkpoint, train
from mpips.training import Trainer
from tests import damage
from tests.choice import first
from tests.mpi.mpips.training.support import Line, data

OLD = Path(__file__).parents[2] / "data" / "e292923"
"""What mpips wrote before its files had checksums."""
X, Y = data()
TRAINERS = "step-00000025"
SUM = find_reduction("sum", np.dtype("f4"))
TABLE = table.TuningTable(
    slots={2: Slots(1000, 2000), 4: Slots(10, 10)},
    cross_memory={2: 30_000},
    between={"allreduce 2x4": (Range(100, "ring"), Range(EVERYTHING, "hierarchical(between=ring)"))},
    near=table.LinearCost(1e-6, 1e-9),
)


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    """A folder with one file of each kind, as they are written today."""
    folder = tmp_path_factory.mktemp("new")
    kv = mpips.create("local")
    kv.init(["w", "b"], [np.random.default_rng(1).random((30, 40), np.float32), np.ones(3)])
    kv.set_optimizer("adam", learning_rate=0.1)
    kv.pushpull(["w", "b"], [np.ones((30, 40), np.float32), np.ones(3)])
    kv.save(folder / "store.safetensors")
    kv.save_optimizer_states(folder / "states.safetensors", dump_optimizer=True)
    kv.close()
    kv = mpips.create("local")
    trainer = Trainer(Line(), kv, "adam", learning_rate=0.05, clip_norm=0.5)
    for _ in range(25):
        trainer.step(X, Y)
    trainer.save(folder)
    kv.close()
    mesh = Mesh(1, 1)
    rows = load(lambda: SyntheticSource(20, 3, 2), mesh, 5, seed=1)
    save_checkpoint(str(folder / "mlp.safetensors"), train(MLP([3, 4, 2], seed=3), rows, mesh, 1).worker, rows)
    mesh.free()
    return folder


class Readers:
    """Who reads each kind of file, with a store that is made anew after each that it has taken."""

    def __init__(self, folder):
        self.folder, self.kv, self.mesh = folder, None, Mesh(1, 1)

    def close(self):
        if self.kv is not None:
            self.kv.close()
        self.kv = None
        self.mesh.free()

    def store(self, path):
        self._read(lambda kv: None, lambda kv: kv.load(path))

    def states(self, path):
        shape, optimizer = ((2, 3), "sgd") if path.parent == OLD else ((30, 40), "adam")
        numbers = {"momentum": 0.9} if optimizer == "sgd" else {}

        def begin(kv):
            kv.init(["w", "b"], [np.ones(shape, np.float32), np.ones(3)])
            kv.set_optimizer(optimizer, learning_rate=0.1, **numbers)

        self._read(begin, lambda kv: kv.load_optimizer_states(path))

    def trainer(self, path):
        self._resume(path)

    def trainers_store(self, path):
        self._resume(path.with_name(f"{TRAINERS}.trainer.safetensors"))

    def mlp(self, path):
        load_checkpoint(str(path), self.mesh)

    def _resume(self, path):
        def begin(kv):
            self.made = Trainer(Line(5), kv, "adam", learning_rate=0.05, clip_norm=0.5)

        self._read(begin, lambda kv: self.made.resume(path))

    def _read(self, begin, read):
        if self.kv is None:
            self.kv = mpips.create("local")
            begin(self.kv)
        read(self.kv)
        self.kv.close()
        self.kv = None


FILES = {
    "store": "store.safetensors",
    "states": "states.safetensors",
    "trainer": f"{TRAINERS}.trainer.safetensors",
    "trainers_store": f"{TRAINERS}.store.safetensors",
    "mlp": "mlp.safetensors",
}


@pytest.fixture
def readers(tmp_path):
    made = Readers(tmp_path)
    yield made
    made.close()


def copies(source, folder):
    """A folder with the files of another, and the bytes of each."""
    for path in source.iterdir():
        shutil.copy(path, folder)
    return {kind: (folder / name, (folder / name).read_bytes()) for kind, name in FILES.items()}


@pytest.mark.parametrize("kind", FILES)
def test_files_are_taken_as_they_were_written(new, tmp_path, readers, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(readers, kind)(new / FILES[kind])


@first(1, count=[40, 300])
@pytest.mark.parametrize("kind", FILES)
def test_every_flipped_bit_is_noticed(new, tmp_path, readers, kind, count):
    path, whole = copies(new, tmp_path)[kind]
    taken = []
    for seed in range(count):
        path.write_bytes(damage.flipped(whole, random.Random(f"{kind} {seed}")))
        if damage.refused(lambda: getattr(readers, kind)(path), 2 * len(whole), (ValueError, TypeError)) is None:
            taken.append(seed)
    assert not taken


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FILES)
def test_files_without_checksums_load_with_a_warning(readers, kind):
    getattr(readers, kind)(OLD / FILES[kind])
    with pytest.warns(RuntimeWarning, match=f"{FILES[kind]} has no checksums, as an older mpips wrote it"):
        getattr(readers, kind)(OLD / FILES[kind])


def test_old_files_have_the_values_that_were_saved():
    kv = mpips.create("local")
    with pytest.warns(RuntimeWarning, match="no checksums"):
        kv.load(OLD / "store.safetensors")
    kv.pull(["w", "b"], [w := np.empty((2, 3), np.float32), b := np.empty(3)])
    kv.close()
    assert (w == np.arange(6, dtype=np.float32).reshape(2, 3) - np.float32(0.2805)).all() and np.allclose(b, 0.7195)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@first(1, count=[60, 500])
@pytest.mark.parametrize("kind", FILES)
def test_damage_to_a_file_without_checksums_is_a_sentence(tmp_path, readers, kind, count):
    """Taken or refused, as it may be; by our errors alone, and nothing is allocated on a header's word."""
    path, whole = copies(OLD, tmp_path)[kind]
    refusals, read = 0, getattr(readers, kind)
    for seed in range(count):
        path.write_bytes(damaged := damage.damaged_tensors(whole, random.Random(f"{kind} {seed}")))
        refusals += damage.refused(lambda: read(path), 2 * len(damaged), (ValueError, TypeError)) is not None
    assert refusals > count // 2


FAULTS = chaos.draw(3, 12, 2.0, kinds=["kill", "stop", "slow"], roles=["worker", "rank"])
PROFILE = overlap.create_profile(
    ["a", "b"], [10, 20], [0.1, 0.2], [0.3, 0.4], overlap.LinearNetwork(1e-5, 1e-9, 4), 1e-4, 1e9
)


def see_table(path):
    """A spoilt table is left aside with a warning, and whatever is taken answers for every call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        usable = table.load_or_warn(check_algorithm)
    for ranks in (1, 2, 3, 4):
        assert 0 <= usable.slot_limits(ranks, False).always <= usable.slot_limits(ranks, False).ordinary
        for nbytes in (0, 1000, 1 << 40):
            catalog.check_algorithm("allreduce", usable.best_between("allreduce", 2, ranks, nbytes))
    for way in ("slots", "direct"):
        assert predict_seconds(usable, Call("allreduce", 9, np.dtype("f4"), SUM, 0, "shared_memory", 4), 1, way) >= 0
    table.load(check_algorithm)


JSON_FILES = {
    "plan": (lambda path: chaos.save(FAULTS, path), chaos.load, chaos.PlanError),
    "profile": (lambda path: overlap.save_profile(PROFILE, path), overlap.load_profile, ValueError),
    "table": (lambda path: table.save(TABLE), see_table, CollectiveError),
}


@pytest.mark.slow
@first(1, count=[150, 500])
@pytest.mark.parametrize("kind", JSON_FILES)
def test_damage_to_json_is_a_sentence(tmp_path, monkeypatch, kind, count):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = table.path()
    path.parent.mkdir()
    save, read, error = JSON_FILES[kind]
    save(path)
    read(path)
    whole, refusals = path.read_bytes(), 0
    for seed in range(count):
        path.write_bytes(damaged := damage.damaged_json(whole, random.Random(f"{kind} {seed}")))
        refusals += damage.refused(lambda: read(path), 2 * len(damaged), error) is not None
    assert refusals > count // 3
