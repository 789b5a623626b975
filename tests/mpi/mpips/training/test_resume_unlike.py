"""A resume by an unlike training: what it takes from the checkpoint, and what it refuses on all workers at once."""

from __future__ import annotations

import numpy as np
import pytest

from mpips.training import Callback, Checkpoint, Elastic, Trainer
from tests.mpi.mpips.support import failure
from tests.mpi.mpips.training.support import Line, data, on_workers, workers_of
from tests.mpi.sizes import either_mpi

ELASTIC = {"elastic": Elastic(alpha=0.3, interval=2)}
OWN = [("dist_sync", {"clip_norm": 0.5}), ("mpi_sync-0", {"clip_norm": 0.5}), ("mpi_async-1", ELASTIC)]
"""Where workers have an optimizer of their own."""
FILE = "step-{:08d}.trainer.safetensors"
X, Y = data()


class Plateau(Callback):
    """Another learning rate after the second step."""

    def on_step(self, fit):
        if fit.step == 2:
            fit.update_optimizer(learning_rate=0.002)


def saved(kv, folder, optimizer="sgd", **options):
    """A Trainer that has saved after each of its steps."""
    trainer = Trainer(Line(), kv, optimizer, **options)
    trainer.fit(X, Y, batch_size=2, epochs=1, callbacks=[Checkpoint(folder, every=1, keep=None)])
    return trainer


def refused(trainer, call):
    """The sentence, which all workers raise before anything has changed; and the store goes on."""
    before = trainer.model.bits()
    said = failure(call)
    assert trainer.model.bits() == before
    told = trainer.kv.worker.agree("test", data=said.encode())
    assert len(set(told)) == 1, told
    assert trainer.step(X[:2], Y[:2]) > 0
    return said


@either_mpi
@pytest.mark.parametrize("kind, options", [("dist_sync", {}), *OWN])
def test_numbers_that_changed_before_the_checkpoint_go_on_with_the_same_bits(kind, options, mpi_tmp_path):
    bits = []

    def work(kv, seed, callbacks, resume=None):
        model = Line(seed)
        trainer = Trainer(model, kv, "adam", learning_rate=0.05, **options)
        trainer.fit(X, Y, batch_size=2, epochs=1, callbacks=callbacks, resume=resume)
        bits.append(model.bits())

    on_workers(kind, lambda kv: work(kv, 0, [Plateau(), Checkpoint(mpi_tmp_path, every=1, keep=None)]))
    on_workers(kind, lambda kv: work(kv, 8, [], mpi_tmp_path / FILE.format(3)))
    if bits:
        assert bits[0] == bits[1]


@either_mpi
@pytest.mark.parametrize("kind, options", OWN)
def test_another_optimizer_of_the_workers_is_refused(kind, options, mpi_tmp_path):
    def resumed(kv, optimizer, words):
        trainer = Trainer(Line(5), kv, optimizer, **options)
        assert words in refused(trainer, lambda: trainer.resume(mpi_tmp_path))

    on_workers(kind, lambda kv: saved(kv, mpi_tmp_path, "sgd", momentum=0.9, **options))
    on_workers(kind, lambda kv: resumed(kv, "adam", "was saved with the optimizer SGD, and this Trainer has Adam"))
    on_workers(kind, lambda kv: resumed(kv, "sgd", "0/state0/0 is F64(8,) in the file and not there in this Trainer"))


@pytest.mark.parametrize("kind, options", OWN)
def test_what_rank_0_cannot_read_is_told_to_all(kind, options, mpi_tmp_path):
    """A bit that has turned in an array of the workers' own."""

    def work(kv):
        trainer = saved(kv, mpi_tmp_path, **options)
        path = max(mpi_tmp_path.glob("*.trainer.safetensors"), default=None) if kv.rank == 0 else None
        if path is not None:
            whole = path.read_bytes()
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        kv.barrier()
        assert "does not fit its checksum" in refused(trainer, lambda: trainer.resume(mpi_tmp_path))
        if path is not None:
            path.write_bytes(whole)
        kv.barrier()
        assert trainer.resume(mpi_tmp_path) > 0

    on_workers(kind, work)


@either_mpi
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.5}])
def test_another_number_of_workers_has_the_mean_over_its_own(options, mpi_tmp_path):
    """One worker less saves; the first step after the resume is that of a Trainer which began there."""
    models = []

    def resumed(kv):
        trainer = Trainer(Line(5), kv, "sgd", learning_rate=0.1, **options)
        trainer.resume(mpi_tmp_path)
        models.append(start := Line())
        for mine, theirs in zip(start.parameters, trainer.model.parameters):
            mine[...] = theirs
        other = Trainer(start, kv, "sgd", learning_rate=0.1, **options)
        for each in (trainer, other):
            each.step(X, Y)
        for mine, theirs in zip(start.parameters, trainer.model.parameters):
            np.testing.assert_array_equal(mine, theirs)

    workers_of("dist_sync")
    on_workers("dist_sync", lambda kv: Trainer(Line(), kv, "sgd", learning_rate=0.1, **options).save(mpi_tmp_path))
    on_workers("dist_sync-0", resumed)
    assert models


@pytest.mark.parametrize("kind", ["dist_sync", "mpi_sync-0"])
def test_other_exchanges_in_the_middle_of_an_epoch_are_refused(kind, mpi_tmp_path):
    def resumed(kv):
        trainer = Trainer(Line(5), kv, "sgd", accumulate=4)
        middle = mpi_tmp_path / FILE.format(1)
        said = refused(trainer, lambda: trainer.fit(X, Y, batch_size=2, epochs=1, resume=middle))
        assert "accumulate=2, and this fit has" in said and "accumulate=4: give the same" in said

    on_workers(kind, lambda kv: saved(kv, mpi_tmp_path, accumulate=2))
    on_workers(kind, resumed)


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("kind", ["dist_sync", "mpi_sync-0"])
def test_all_know_in_which_epoch_any_worker_was(kind, mpi_tmp_path):
    """Rank 0 had batches, the others none: they alone would not see that the order is another."""

    def begun(kv):
        batches = [(X[:4], Y[:4])] * 3 if kv.rank == 0 else []
        trainer = Trainer(Line(), kv, "sgd")
        trainer.fit(batches, epochs=1, callbacks=[Checkpoint(mpi_tmp_path, every=1, keep=None)])

    def resumed(kv):
        trainer = Trainer(Line(5), kv, "sgd")
        middle = mpi_tmp_path / FILE.format(1)
        said = refused(trainer, lambda: trainer.fit(X, Y, batch_size=4, epochs=1, resume=middle))
        assert "in the middle of epoch 1 of batches of an iterable" in said
        trainer.resume(middle)
        assert "in the middle of epoch 1" in refused(trainer, lambda: trainer.fit(X, Y, batch_size=4, epochs=1))

    on_workers(kind, begun)
    on_workers(kind, resumed)


@pytest.mark.parametrize("kind", ["dist_sync", "mpi_sync-0"])
def test_a_folder_that_cannot_take_the_first_checkpoint_is_refused_before_the_first_step(kind, mpi_tmp_path):
    def work(kv):
        saved(kv, mpi_tmp_path / "a")
        if kv.rank == 0:
            (mpi_tmp_path / "file").touch()
        kv.barrier()
        trainer = Trainer(Line(5), kv, "sgd")
        for name, words in (("a", "has a checkpoint of step"), ("file/b", "cannot be made")):
            assert words in refused(
                trainer,
                lambda name=name: trainer.fit(
                    X, Y, batch_size=2, epochs=1, callbacks=[Checkpoint(mpi_tmp_path / name)]
                ),
            )

    on_workers(kind, work)
    on_workers(
        kind,
        lambda kv: Trainer(Line(5), kv, "sgd").fit(  # it goes on from there
            X, Y, batch_size=2, epochs=2, callbacks=[Checkpoint(mpi_tmp_path / "a")], resume=mpi_tmp_path / "a"
        ),
    )
