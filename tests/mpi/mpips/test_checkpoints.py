"""Checkpoints: what a store holds, of any number of servers and clients, into any other; while training goes on.

python -m tests.mpi.mpips.test_checkpoints kills [COUNT]        killed while it saves, so many times
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import mpips
from launch import Job, build, find, this_machine
from mpips.store.checkpoint.file import write
from tests import child
from tests.choice import first
from tests.mpi.mpips.faults import workers
from tests.mpi.mpips.support import WORLD, failure, need, run
from tests.mpi.sizes import only_on

MODULE = "tests.mpi.mpips.test_checkpoints"
ROOT = Path(__file__).resolve().parents[3]
SIZES = {"small": (3, 5), "big": (700, 1000), "empty": (0, 2), "one": ()}
BIG = 100_000  # elements from which on servers share an array
WAYS = [
    ("dist_sync", {"servers": 1}),
    ("dist_sync", {"servers": 2}),
    ("mpi_sync", {"servers": 0}),
    ("mpi_sync", {"servers": 1, "clients": 2}),
    ("mpi_sync", {"servers": 1, "clients": 1, "masters": "all"}),
    ("dist_async", {"servers": 1}),
]


@pytest.fixture
def folder():
    """A new folder, the same on all ranks."""
    made = tempfile.mkdtemp() if WORLD.rank == 0 else None
    place = Path(WORLD.bcast(made))
    yield place
    WORLD.Barrier()
    if WORLD.rank == 0:
        for path in place.iterdir():
            path.unlink()
        place.rmdir()


def gradient(shape, step, seed):
    """The sum of gradients that all workers push in a step, whatever their number is."""
    return np.random.default_rng([seed, step]).standard_normal(shape, np.float32)


def train(kv, steps, values):
    """Steps in which worker 0 pushes all of the gradient: results do not depend on who else there is."""
    for step in steps:
        for seed, (name, value) in enumerate(values.items()):
            mine = gradient(value.shape, step, seed) if kv.rank == 0 else np.zeros(value.shape, np.float32)
            kv.pushpull(name, mine, value)


AGAIN = """
import sys, numpy as np, mpips
kv = mpips.create(sys.argv[1], servers=int(sys.argv[2]), checkpoint=sys.argv[3], every=1)
value = np.ones(3)
kv.init("w", value)
kv.set_optimizer("sgd", learning_rate=float(sys.argv[4]))
for _ in range(4):
    before = value[0]
    kv.pushpull("w", np.ones(3), out=value)
print(f"[rank {kv.rank} went by {before - value[0]}]", flush=True)
kv.close()
"""


@pytest.mark.slow
@only_on(1)
@pytest.mark.parametrize("kind, servers", [("dist_sync", 1), ("mpi_sync", 0)])
def test_a_job_that_goes_on_with_another_learning_rate_says_which_holds(tmp_path, kind, servers):
    (tmp_path / "again.py").write_text(AGAIN)

    def job(rate):
        words = [str(tmp_path / "again.py"), kind, str(servers), str(tmp_path), rate]
        argv = ["run", "-w", "2", "-s", str(servers), *words]
        said = BytesIO()
        code = child.run([sys.executable, "-m", "launch.cli", *argv], 60, ROOT, said)
        text = said.getvalue().decode()
        assert code == 0 and text.count("went by 0.5]") == 2, text  # two workers' gradients
        return text.count(
            "set_optimizer: learning_rate is 0.25 in the checkpoint and 0.5 in the program: the "
            "checkpoint's holds; change it by update_optimizer"
        )

    assert [job("0.25"), job("0.25"), job("0.5")] == [0, 0, 1]  # rank 0 says it


def test_a_job_does_not_begin_anew_where_none_of_its_checkpoints_can_be_read(folder):
    """What it saves would take their places."""
    if WORLD.rank == 0:
        for step in (4, 6):
            (folder / f"store-{step:08d}.safetensors").write_bytes(b"damaged")
    WORLD.Barrier()
    said = failure(lambda: run("dist_sync", lambda kv: None, checkpoint=str(folder), every=2))
    assert "store-00000006.safetensors cannot be read" in said


def fresh(kv, momentum=0.9):
    """A store that begins."""
    values = {name: np.full(shape, 1.0, np.float32) for name, shape in SIZES.items()}
    kv.init(list(values), list(values.values()))
    kv.set_optimizer("sgd", learning_rate=mpips.optimizers.Cosine(0.1, 20), momentum=momentum)
    kv.set_optimizer("adam", learning_rate=0.01, keys=["small"])
    return values


def whole(values):
    return np.concatenate([value.reshape(-1) for value in values.values()])


@only_on(3, 5)
@first(1, wait=[False, True])
def test_saved_by_one_store_and_loaded_by_another(folder, wait):
    """Of any number of servers and clients, each into each: training goes on bitwise as if it had not stopped."""
    fits = [(kind, options) for kind, options in WAYS if WORLD.size - options["servers"] >= options.get("clients", 1)]
    fits = [(kind, options) for kind, options in fits if kind.endswith("_sync")]

    def straight(kv):
        values = fresh(kv)
        train(kv, range(6), values)
        return whole(values)

    expected = run(*fits[0][:1], straight, big_array=BIG, **fits[0][1])
    for number, (kind, options) in enumerate(fits):
        path = folder / f"{number}"

        def save(kv, path=path):
            values = fresh(kv)
            train(kv, range(3), values)
            saving = kv.save(path, wait=wait)
            train(kv, range(3, 5), values)
            if not wait:
                saving.wait()
            kv.barrier()

        run(kind, save, big_array=BIG, **options)
        for other, others in (fits[0], fits[(number + 1) % len(fits)], fits[2]):

            def load(kv, path=path):
                kv.load(path)
                values = {name: np.empty(shape, np.float32) for name, shape in SIZES.items()}
                train(kv, range(3, 6), values)
                return whole(values)

            found = run(other, load, big_array=BIG, **others)
            assert found is None or expected is None or (found == expected).all(), (kind, options, other, others)


@only_on(3, 5)
@pytest.mark.parametrize("kind, options", WAYS)
def test_a_background_save_holds_the_values_of_its_round(folder, kind, options):
    need(1, **options)

    def body(kv):
        values = fresh(kv)
        if kv.type.endswith("_async"):
            kv.barrier()
        train(kv, range(3), values)
        kv.barrier()
        kv.pull(list(values), list(values.values()))
        before = {name: value.copy() for name, value in values.items()}
        workers(options["servers"]).Barrier()
        saving = kv.save(folder / "x", wait=False)
        train(kv, range(3, 30), values)
        saving.wait()
        kv.barrier()
        if kv.rank == 0:
            with safe_open(folder / "x", framework="numpy") as file:
                for name, value in before.items():
                    assert (file.get_tensor(f"value/{name}") == value).all(), name
            assert [path.name for path in folder.iterdir()] == ["x"]

    run(kind, body, big_array=BIG, **options)


@only_on(3)
@pytest.mark.parametrize("kind, options", [WAYS[0], WAYS[2], WAYS[4]])
def test_a_load_into_the_store_that_saved(folder, kind, options):
    """Values, momentum and steps go back; keys, optimizers and rounds stay usable; after a fault, too."""
    need(1, **options)

    def body(kv):
        values = fresh(kv)
        train(kv, range(3), values)
        kv.save(folder / "x")
        train(kv, range(3, 6), values)
        expected = whole(values)
        kv.load(folder / "x")
        train(kv, range(3, 6), values)
        assert (whole(values) == expected).all()
        kv.barrier()  # who is first in `recover` ends the generation for whoever is still in a call
        kv.recover()
        kv.load(folder / "x")
        train(kv, range(3, 6), values)
        assert (whole(values) == expected).all()
        kv.set_optimizer("sgd", learning_rate=0.5)
        kv.load(folder / "x")  # brings its optimizers back
        train(kv, range(3, 6), values)
        assert (whole(values) == expected).all()

    run(kind, body, **options)


@only_on(3)
@pytest.mark.parametrize("kind, options", [WAYS[0], WAYS[2], ("mpi_sync", {"servers": 1, "clients": 1})])
def test_what_compression_kept_back_comes_back(folder, kind, options):
    """Each worker's, or client's, own: pushes after a load are bitwise those that would have been made."""
    need(1, **options)

    def steps(kv, which):
        out = np.empty(999, np.float32)
        for step in which:
            kv.pushpull("w", gradient(999, step, kv.rank), out)
        return out

    def straight(kv):
        kv.init("w", np.zeros(999, np.float32))
        kv.set_optimizer("sgd", learning_rate=0.1)
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.7})
        steps(kv, range(4))
        kv.save(folder / "x")
        return steps(kv, range(4, 8))

    def again(kv):
        kv.load(folder / "x")
        return steps(kv, range(4, 8))

    expected, found = run(kind, straight, **options), run(kind, again, **options)
    assert expected is None or (expected == found).all()
    run("mpi_sync" if kind == "dist_sync" else "dist_sync", again, servers=1)  # another number of those who send


@only_on(3)
@pytest.mark.parametrize("servers", [0, 1])
def test_a_load_while_a_save_is_under_way_changes_nothing_of_it(folder, servers):
    need(1, servers=servers)

    def body(kv):
        kv.init("w", np.zeros((700, 1000)))
        out = np.empty((700, 1000))
        kv.save(folder / "first")
        kv.push("w", np.full((700, 1000), 1.0))
        second = kv.save(folder / "second", wait=False)
        kv.load(folder / "first")
        kv.pull("w", out)
        assert (out == 0).all()
        second.wait()
        kv.load(folder / "second")
        kv.pull("w", out)
        assert (out == kv.num_workers).all()

    run("dist_sync" if servers else "mpi_sync", body, servers=servers)


@only_on(2, 3)
@pytest.mark.parametrize("servers", [0, 1])
def test_a_load_of_the_file_that_is_being_written(folder, servers):
    """It is the new file whole, which has another key."""
    need(1, servers=servers)

    def body(kv):
        kv.init("w", np.zeros((700, 1000)))
        kv.save(folder / "x")
        kv.init("v", np.ones(3))
        kv.push("w", np.full((700, 1000), 1.0))
        kv.save(folder / "x", wait=False)
        kv.load(folder / "x")
        kv.pull(["w", "v"], [out := np.empty((700, 1000)), other := np.empty(3)])
        assert (out == kv.num_workers).all() and (other == 1).all() and kv.generation == 0

    run("dist_sync" if servers else "mpi_sync", body, servers=servers)


@only_on(2)
@pytest.mark.parametrize("servers", [0, 1])
def test_keys_without_an_optimizer_beside_those_with_one(folder, servers):
    need(1, servers=servers)

    def body(kv):
        kv.init(["a", "b"], [np.ones(3), np.ones(3)])
        kv.set_optimizer("adam", keys=["a"])
        kv.pushpull(["a", "b"], [np.ones(3), np.ones(3)], [a := np.empty(3), b := np.empty(3)])
        kv.save(folder / "x")
        kv.save_optimizer_states(folder / "y")
        kv.push(["a", "b"], [np.zeros(3), np.zeros(3)])
        kv.load(folder / "x")
        kv.load_optimizer_states(folder / "y")
        kv.pull(["a", "b"], [again := np.empty(3), others := np.empty(3)])
        assert (again == a).all() and (others == b).all() and kv.generation == 0

    run("dist_sync" if servers else "mpi_sync", body, servers=servers)


@only_on(2, 3)
def test_a_path_that_cannot_travel_does_not_end_the_generation(folder):
    def body(kv):
        kv.init("w", np.ones(3))
        kv.set_optimizer("sgd", learning_rate=0.1)
        for call in (kv.save, kv.load, kv.save_optimizer_states, kv.load_optimizer_states):
            with pytest.raises(ValueError, match=r"udcff' has a character that cannot be in it"):
                call(f"{folder}/\udcff")
        with pytest.raises((ValueError, TypeError), match="save: path None is of type NoneType"):
            kv.save(None if kv.rank == 0 else folder / "x")
        kv.barrier()
        assert kv.generation == 0 and not list(folder.iterdir())

    run("dist_sync", body, servers=1)


@only_on(3)
@pytest.mark.parametrize("servers", [0, 1])
def test_a_file_that_lacks_a_tensor_changes_nothing_on_any_worker(folder, servers):
    need(1, servers=servers)

    def body(kv):
        kv.init(["a", "b"], [np.ones(3), np.ones(3)])
        kv.save(folder / "x")
        if kv.rank == 0:
            with safe_open(folder / "x", framework="numpy") as file:
                header = file.metadata()
            write(folder / "x", {"value/a": np.full(3, 7.0)}, header)
        with pytest.raises(ValueError, match="no tensor 'value/b', which its header promises"):
            kv.load(folder / "x")
        kv.pull(["a", "b"], [a := np.empty(3), b := np.empty(3)])
        assert (a == 1).all() and (b == 1).all() and kv.generation == 0

    run("dist_sync" if servers else "mpi_sync", body, servers=servers)


@only_on(3)
def test_a_save_needs_one_round(folder):
    def body(kv):
        kv.init("w", np.zeros(10))
        if kv.rank == 0:
            kv.push("w", np.ones(10))
        with pytest.raises(ValueError, match="pushes of key 'w' is 1 on rank 0 and 0 on rank 1: call it after"):
            kv.save(folder / "x")
        assert kv.rank or not list(folder.iterdir())  # rank 0 has the file, and gives it up
        if kv.rank == 1:
            kv.push("w", np.ones(10))
        kv.pull("w", out := np.zeros(10))
        assert (out == 2).all() and kv.generation == 0

    run("dist_sync", body, servers=1)


@only_on(1)
@first(1, count=[1, 3])
def test_killed_while_it_saves(count):
    assert killed(count) == count


# ---- as a program


def saves(path: str) -> None:
    """One rank of a job that saves again and again until it is killed; values tell their round."""
    kv = mpips.create("dist_sync", servers=1)
    kv.init("w", np.zeros(500_000))
    table, ids = kv.table("rows", 5, "float64", mpips.uniform(0), "sgd", learning_rate=1.0), np.arange(30_000)
    for number in range(1, 10**6):
        kv.pushpull("w", np.full(500_000, float(number)))
        table.push(ids, np.full((len(ids), 5), -1.0))
        saving = kv.save(path, wait=number % 2 == 0)
        if saving is not None:
            saving.wait()
        if kv.rank == 0:
            print(number, flush=True)


def loads(path: str) -> None:
    """One rank of a job that loads what is there; it is of one round."""
    kv = mpips.create("dist_sync", servers=1)
    kv.load(path)
    kv.pull("w", out := np.empty(500_000))
    rows = kv.table("rows", 5, "float64", mpips.uniform(0), "sgd", learning_rate=1.0).pull(np.arange(30_000))
    assert len(np.unique(out)) == 1 and out[0] > 0, np.unique(out)
    assert (rows == out[0]).all(), (out[0], np.unique(rows))


def killed(count: int) -> int:
    """How many times of `count` a job that is killed while it saves leaves a checkpoint that can be loaded."""
    rng, good = np.random.default_rng(3), 0
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/x"
        for number in range(count):
            argv = _argv(3, "saves", path)
            job = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
            assert job.stdout is not None
            job.stdout.readline()
            time.sleep(rng.random() * 0.1)
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
            job.stdout.close()
            time.sleep(0.5)  # ranks see that mpirun is gone
            done = subprocess.run(_argv(2, "loads", path), timeout=60, capture_output=True, check=False)
            good += done.returncode == 0
            print(f"killed {number + 1} times, loaded {good} times", flush=True)
    return good


def _argv(ranks: int, *words: str) -> list[str]:
    return build(find(python=sys.executable), Job(ranks, (sys.executable, "-m", MODULE, *words)), this_machine())


if __name__ == "__main__":
    if sys.argv[1] == "kills":
        wanted = int(sys.argv[2]) if len(sys.argv) > 2 else 50
        sys.exit(killed(wanted) != wanted)
    {"saves": saves, "loads": loads}[sys.argv[1]](*sys.argv[2:3])
