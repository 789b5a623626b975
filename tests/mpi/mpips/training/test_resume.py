"""A training that goes on from a checkpoint gives the bits of one that never stopped; a job that is killed, too.

    python -m tests.mpi.mpips.training.test_resume MODE KIND FOLDER

is a rank of a job: MODE is whole, killed or resumed, KIND kinds of store with commas.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import mpips
from mpips.training import Callback, Checkpoint, EarlyStop, Elastic, LearningRate, Local, Trainer
from mpips.training.checkpoint import steps_in
from tests import child
from tests.choice import first
from tests.mpi.mpips.support import failure
from tests.mpi.mpips.training.support import KINDS, ONE_CLIENT, SYNCHRONOUS, Line, data, on_workers, uneven
from tests.mpi.sizes import JOB_LIMIT, either_mpi, only_on

MODULE = "tests.mpi.mpips.training.test_resume"
ROOT = Path(__file__).resolve().parents[4]
WORLD = MPI.COMM_WORLD
RANKS, EVERY, EPOCHS, BATCH = 4, 3, 3, 2
MODES = ("whole", "killed", "resumed")
STEPS = EPOCHS * (50 // (BATCH * RANKS))
"""Of a job, at least: where servers are among its ranks there are more."""


class Curve(Callback):
    """The losses of a worker's steps, as hexadecimal floats, in a list and in a file."""

    def __init__(self, file: Path | None = None, die: int = -1) -> None:
        self.losses: dict[int, str] = {}
        self._file, self._die = file, die

    def on_step(self, fit: Any) -> None:
        self.losses[fit.step] = fit.last_loss.hex()
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(f"{fit.step} {self.losses[fit.step]}\n")
        if fit.step == self._die:
            os.kill(os.getpid(), signal.SIGKILL)


def told(history: list[Any], model: Line) -> list[str]:
    """All that must be equal in the end."""
    words = [f"{epoch.epoch} {epoch.loss.hex()} {epoch.test['loss'].hex()}" for epoch in history]
    return [*words, hashlib.sha256(model.bits()).hexdigest()]


def trained(kv: Any, folder: Path, curve: Curve, resume: Any = None, seed: int = 0, **options: Any) -> list[str]:
    """Train a model to its end, with all that a checkpoint keeps."""
    x, y = data()
    model = Line(seed)
    trainer = Trainer(model, kv, "adam", learning_rate=0.05, **options)
    callbacks = [
        curve,
        EarlyStop("loss", patience=99),
        LearningRate(lambda epoch: 0.1 / epoch),
        Checkpoint(folder, every=EVERY, keep=None),
    ]
    history = trainer.fit(
        x, y, batch_size=BATCH, epochs=EPOCHS, seed=3, test=(x, y), callbacks=callbacks, resume=resume
    )
    return told(history, model)


@pytest.fixture
def folder():
    """One folder for all ranks, which goes with the test."""
    made = Path(WORLD.bcast(tempfile.mkdtemp() if WORLD.rank == 0 else None))
    yield made
    WORLD.Barrier()
    if WORLD.rank == 0:
        shutil.rmtree(made, ignore_errors=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.5},
    "accumulated": {"accumulate": 2},
    "compressed": {},
    "elastic": {"elastic": Elastic(alpha=0.3, interval=2), "clip_norm": 0.5},
    "local": {"local": Local(every=2, fragments=2, keep=0.25), "clip_norm": 0.5},
}
CASES = [
    *((kind, "plain") for kind in (*SYNCHRONOUS, *ONE_CLIENT)),
    *((kind, what) for kind in ("dist_sync", "mpi_sync-one", "mpi_sync-0") for what in ("clipped", "accumulated")),
    ("dist_sync", "compressed"),
    ("mpi_sync-one", "compressed"),
    ("mpi_async-1", "elastic"),
    ("dist_sync", "local"),
    ("dist_sync-0", "local"),
    ("mpi_sync-one", "local"),
]


@pytest.mark.core(8)
@either_mpi
@pytest.mark.parametrize("kind, what", CASES)
def test_a_training_goes_on_with_the_same_bits(kind, what, folder):
    """From a step in the middle of an epoch, in a new store, with a model that began elsewhere."""
    first, second = Curve(), Curve()
    ended = []

    def prepared(kv):
        if what == "compressed":
            kv.set_gradient_compression({"type": "2bit", "threshold": 0.05})
        return kv

    on_workers(kind, lambda kv: ended.append(trained(prepared(kv), folder / "a", first, **OPTIONS[what])))
    at = steps_in(folder / "a")[0] if WORLD.rank == 0 else None
    start = f"{WORLD.bcast(at)}.trainer.safetensors"
    on_workers(
        kind, lambda kv: ended.append(trained(prepared(kv), folder / "b", second, start, seed=8, **OPTIONS[what]))
    )
    if ended:
        assert ended[0] == ended[1]
        assert second.losses and min(second.losses) == EVERY + 1
        assert second.losses == {step: loss for step, loss in first.losses.items() if step > EVERY}


@either_mpi
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_uneven_batches_go_on_with_the_same_bits(kind, folder):
    bits, curves = [], [Curve(), Curve()]

    def work(kv, resume):
        model = Line()
        trainer = Trainer(model, kv, "sgd", learning_rate=0.05, momentum=0.9)
        keep = [curves[len(bits)], Checkpoint(folder / "a", every=2, keep=None)]
        trainer.fit(
            lambda epoch: uneven(kv.rank, epoch), epochs=2, callbacks=keep if not resume else keep[:1], resume=resume
        )
        bits.append(model.bits())

    on_workers(kind, lambda kv: work(kv, None))
    start = f"{folder / 'a'}/step-00000002.trainer.safetensors"
    on_workers(kind, lambda kv: work(kv, start))
    if bits:
        assert bits[0] == bits[1]
        both = [{step: curve.losses[step] for step in curve.losses if step > 2} for curve in curves]
        if WORLD.rank != 1:  # it has no batches, and so no losses
            assert both[0] == both[1] and both[1]


@pytest.mark.parametrize("kind", ["dist_async", "mpi_async"])
def test_asynchronous_workers_go_on_from_what_the_servers_had(kind, folder):
    def work(kv):
        x, y = data()
        for elastic in (None, Elastic(alpha=0.3, interval=2)):
            place = folder / str(elastic is None)
            models = [Line(seed) for seed in range(2)]
            trainer = Trainer(models[0], kv, "sgd", learning_rate=0.01, elastic=elastic)
            trainer.fit(x, y, batch_size=BATCH, epochs=2, callbacks=[Checkpoint(place)])
            step = trainer.resume(place)
            assert step == 2 * (len(x) // (BATCH * kv.num_workers))
            kept = models[0].bits()
            trainer.step(x[:2], y[:2])
            assert models[0].bits() != kept
            trainer.resume(place)
            assert models[0].bits() == kept
            kv.forget(list(kv.worker.keys))

    on_workers(kind, work)


@pytest.mark.parametrize("kind, clip_norm", [("dist_sync", None), ("mpi_sync-0", 9.0)])
def test_a_resume_with_another_learning_rate_says_which_holds(kind, clip_norm, folder):
    """By fit and by resume; not where the rate is the same, nor where a callback sets it."""
    x, y = data()

    def said(rate, *callbacks, own=False, resume=folder):
        def work(kv):
            trainer = Trainer(Line(), kv, "sgd", learning_rate=rate, momentum=0.5, clip_norm=clip_norm)
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                if own:
                    trainer.resume(folder)
                else:
                    trainer.fit(x, y, batch_size=2, epochs=1, callbacks=callbacks, resume=resume)
            found = [str(each.message) for each in heard if "checkpoint" in str(each.message)]
            return found if kv.rank == 0 else found or words

        found = on_workers(kind, work)
        return words if found is None else found

    words = [
        "resume: learning_rate is 0.05 in the checkpoint and 0.5 in the program: the checkpoint's holds; "
        "change it by trainer.update_optimizer after trainer.resume"
    ]
    said(0.05, Checkpoint(folder), resume=None)
    assert [said(0.5), said(0.5, own=True)] == [words, words]
    quiet = [said(0.05), said(0.5, LearningRate(lambda epoch: 0.1))]
    assert WORLD.rank or quiet == [[], []]


def test_what_cannot_be_resumed_is_told_to_all_and_the_training_goes_on(folder):
    def work(kv):
        x, y = data()
        trainer = Trainer(Line(), kv, "sgd")
        assert "has no checkpoint of a Trainer" in failure(lambda: trainer.resume(folder))
        assert trainer.fit(x, y, batch_size=2, epochs=1, resume=folder / "new")  # there is none: it begins
        trainer.save(folder / "a")
        other = Trainer(Line(), kv, "sgd", accumulate=2)
        assert "has a checkpoint of step" in failure(lambda: other.save(folder / "a"))
        other.step(x, y)
        assert "1 of 2 batches wait" in failure(lambda: other.save(folder / "c"))
        trainer.step(x, y)
        place = Path(trainer.save(str(folder / "a"), keep=1))
        kv.barrier()  # worker 0 removes older ones when all have saved
        assert [path.name for path in steps_in(folder / "a")] == [place.name]
        assert trainer.resume(folder / "a") == int(place.name.removeprefix("step-"))
        clipped = Trainer(Line(), kv, "sgd", clip_norm=1.0)
        assert "give clip_norm, elastic and local as they were" in failure(lambda: clipped.resume(folder / "a"))
        if kv.rank == 0:
            Path(f"{place}.trainer.safetensors").write_text("nothing")
        kv.barrier()
        assert "cannot be read" in failure(lambda: trainer.resume(folder / "a"))
        (folder / "file").touch()
        assert "cannot be made" in failure(lambda: trainer.save(folder / "file" / "a"))
        assert trainer.step(x, y) > 0

    on_workers("dist_sync", work)


def test_another_size_of_mini_batch_goes_on_at_the_end_of_an_epoch_alone(folder):
    def work(kv):
        x, y = data()
        trainer = Trainer(Line(), kv, "sgd")
        trainer.fit(x, y, batch_size=2, epochs=1, callbacks=[Checkpoint(folder, every=2, keep=None)])
        last = 50 // (2 * kv.num_workers)
        middle = folder / "step-00000002.trainer.safetensors"
        said = failure(lambda: trainer.fit(x, y, batch_size=3, epochs=2, resume=middle))
        assert "in the middle of epoch 1 of 50 samples" in said and "give the same" in said
        history = trainer.fit(x, y, batch_size=3, epochs=2, resume=folder / f"step-{last:08d}.trainer.safetensors")
        assert [epoch.epoch for epoch in history] == [1, 2]

    on_workers("mpi_sync-0", work)


# ---- jobs that are killed


def program(mode: str, wanted: str, folder: Path) -> None:
    """One rank: train in kinds of store, one after the other."""
    for kind in wanted.split(","):
        name, options = KINDS[kind]
        try:
            kv = mpips.create(name, **options, workers=RANKS - options["servers"])
        except SystemExit:  # a server, and its workers have left
            continue
        draw = random.Random(kind)  # the same on every rank: a worker, and the step at which it is killed
        step, victim = draw.randrange(EVERY + 1, STEPS), draw.randrange(kv.num_workers)
        die = step if mode == "killed" and kv.rank == victim else -1
        curve = Curve(folder / f"{mode} {kind} {kv.rank}", die)
        keep = folder / kind if mode != "whole" else folder / f"whole {kind}"
        ended = trained(kv, keep, curve, resume=keep)
        (folder / f"{mode} {kind} {kv.rank} end").write_text("\n".join(ended))
        kv.close()


def job(*words: str) -> tuple[int, str]:
    """The exit code and the output of a job of `mpips run`."""
    argv = [sys.executable, "-m", "launch.cli", "run", "-w", str(RANKS), "-m", MODULE, *words]
    said = BytesIO()
    code = child.run(argv, JOB_LIMIT, ROOT, said)
    return code, said.getvalue().decode(errors="replace")


def lines(path: Path) -> dict[int, str]:
    """The losses of a file by their step."""
    return {int(step): loss for step, loss in (line.split() for line in path.read_text().splitlines())}


@pytest.mark.slow
@only_on(1)
@first(1, kinds=[("dist_sync", "mpi_sync-0"), tuple(SYNCHRONOUS)])
def test_a_job_that_is_killed_and_resumed_has_the_curve_of_one_that_was_not(tmp_path, kinds):
    """Kill -9 of one worker at a step drawn by lot; the losses of all steps, bit for bit."""
    code, said = job("whole", ",".join(kinds), str(tmp_path))
    assert code == 0, said[-2000:]
    for kind in kinds:
        code, said = job("killed", kind, str(tmp_path))
        assert code != 0 and not list(tmp_path.glob(f"killed {kind} * end")), said[-2000:]
        assert steps_in(tmp_path / kind), said[-2000:]
    code, said = job("resumed", ",".join(kinds), str(tmp_path))
    assert code == 0, said[-2000:]
    for kind in kinds:
        for rank in range(RANKS - KINDS[kind][1]["servers"]):
            whole, killed, resumed = (lines(tmp_path / f"{mode} {kind} {rank}") for mode in MODES)
            assert len(killed) < len(whole) and 1 < min(resumed) <= max(killed) + 1, (kind, rank)
            assert {**killed, **resumed} == whole, (kind, rank)
            assert all(whole[step] == loss for step, loss in killed.items()), (kind, rank)
            ends = [(tmp_path / f"{mode} {kind} {rank} end").read_text() for mode in ("whole", "resumed")]
            assert ends[0] == ends[1], (kind, rank)


if __name__ == "__main__":
    program(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
