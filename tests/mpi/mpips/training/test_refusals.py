"""What a Trainer cannot do, and arguments that differ: every rank raises one sentence, and the store goes on."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mpips.mlp import MLP
from mpips.training import Callback, Checkpoint, EarlyStop, Elastic, LearningRate, Local, Trainer
from tests.mpi.mpips.support import failure
from tests.mpi.mpips.training.support import Line, data, on_workers

X, Y = data()
CREATE = [
    ({"clip_norm": -1.0}, "clip_norm=-1.0: give a finite number above 0"),
    ({"accumulate": 0}, "accumulate=0: give a number of batches"),
    ({"overlap": "single", "accumulate": 2}, "accumulate=2 needs all gradients of a step before the first is sent"),
    ({"overlap": "single", "clip_norm": 1.0}, "clip_norm=1.0 needs all gradients of a step"),
    ({"elastic": Elastic()}, "elastic averaging needs a store of kind dist_async or mpi_async, not dist_sync"),
    ({"local": 500}, "local=500: give an mpips.training.Local"),
    ({"local": Local(), "overlap": "single"}, "local and overlap='single' are two ways to exchange"),
    ({"local": Local(), "elastic": Elastic()}, "are two ways to exchange"),
    ({"local": Local(delay=2)}, "local: delay=2 is for mpips.torch.LocalSGD"),
    ({"metrics": {"loss": print}}, "metrics: 'loss' is no name for a metric"),
]
FIT = [
    ({"epochs": -1}, "epochs=-1: give at least 0"),
    ({"epochs": 2.5}, "epochs=2.5: give a whole number"),
    ({"y": None}, "x is an array"),
    ({"batch_size": 999}, "batch_size=999 on"),
    ({"x": iter([]), "y": None, "batch_size": None}, "which ends with its first epoch of 2"),
    ({"callbacks": [print]}, "give a list of mpips.training.Callback"),
    ({"callbacks": EarlyStop("loss")}, "give a list of mpips.training.Callback"),
    ({"callbacks": [EarlyStop("test_loss")]}, "this fit measures loss; test= adds more"),
    ({"callbacks": [LearningRate(0.1)]}, "LearningRate(0.1): give a function of the epoch"),
    ({"test": (X, Y[1:])}, "test: 50 inputs, but 49 targets"),
    ({"resume": 3}, "resume: path 3 is of type int"),
]


@pytest.mark.parametrize("options, words", CREATE)
def test_a_trainer_that_cannot_be_is_refused(options, words):
    def work(kv):
        assert words in failure(lambda: Trainer(MLP((4, 2)), kv, "sgd", **options))
        assert Trainer(MLP((4, 2)), kv, "sgd").step(X.astype(np.float32), Y.astype(np.float32)) > 0

    on_workers("dist_sync", work)


@pytest.mark.parametrize("options, words", FIT)
def test_a_fit_that_cannot_be_is_refused_before_its_first_step(options, words):
    def work(kv):
        model = Line()
        trainer = Trainer(model, kv, "sgd")
        before = model.bits()
        assert words in failure(lambda: trainer.fit(**{"x": X, "y": Y, "batch_size": 2, "epochs": 2, **options}))
        assert model.bits() == before
        assert len(trainer.fit(X, Y, batch_size=2, epochs=1)) == 1

    on_workers("dist_sync", work)


@pytest.mark.parametrize(
    "name, options",
    [
        ("epochs", lambda rank: {"epochs": 2 + rank}),
        ("batch_size", lambda rank: {"batch_size": 1 + rank % 2}),
        ("callbacks", lambda rank: {"callbacks": [EarlyStop("loss", 2 + rank)]}),
        ("test", lambda rank: {"test": (X[rank:], Y[rank:])}),
        ("path", lambda rank: {"resume": f"/nowhere/{rank}"}),
        ("resume", lambda rank: {"resume": None if rank else "/nowhere"}),
    ],
)
def test_arguments_of_a_fit_that_differ_are_told_to_all(name, options):
    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        said = failure(lambda: trainer.fit(X, Y, **{"batch_size": 2, "epochs": 2, **options(kv.rank)}))
        if kv.num_workers > 1:
            assert re.search(f"argument '{name}' is .* on rank 0 and .* on rank 1", said)

    on_workers("mpi_sync-0", work)


class Failing(Line):
    """A model whose loss is what the test says."""

    def __init__(self, loss: object) -> None:
        super().__init__()
        self.loss_of_all = loss

    def loss_and_gradients(self, x, y):
        super().loss_and_gradients(x, y)
        return self.loss_of_all


@pytest.mark.parametrize("loss, words", [(None, "returned None: return the mean loss"), (np.ones(3), "an array (3,)")])
def test_a_loss_is_a_number(loss, words):
    def work(kv):
        assert words in failure(lambda: Trainer(Failing(loss), kv, "sgd").step(X, Y))

    on_workers("mpi_sync-0", work)


def test_a_loss_that_is_not_finite_is_told():
    def work(kv):
        with pytest.warns(RuntimeWarning, match="the loss of epoch 1 is nan"):
            Trainer(Failing(np.nan), kv, "sgd").fit(X, Y, batch_size=2, epochs=1)

    on_workers("mpi_sync-0", work)


def test_a_training_without_any_batch_is_none():
    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        assert "no worker has a batch in epoch 1" in failure(lambda: trainer.fit([], epochs=2))
        assert trainer.step(X, Y) > 0

    on_workers("dist_sync", work)


def test_a_callback_that_ends_the_training_on_one_rank_alone():
    class Ends(Callback):
        def on_epoch(self, fit, epoch):
            return fit.rank == 0

    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        said = failure(lambda: trainer.fit(X, Y, batch_size=2, epochs=2, callbacks=[Ends()]))
        assert kv.num_workers == 1 or "'ended the training' is True on rank 0 and False on rank 1" in said

    on_workers("mpi_sync-0", work)


def test_what_goes_on_beside_the_compute_is_neither_joined_nor_saved(mpi_tmp_path):
    def work(kv):
        trainer = Trainer(MLP((4, 2), dtype="float64"), kv, "sgd", overlap="single")
        assert "give arrays x and y with batch_size, or leave overlap out" in failure(
            lambda: trainer.fit([(X, Y)], epochs=1)
        )
        assert "a Trainer with overlap= has no checkpoints" in failure(lambda: trainer.save(mpi_tmp_path))
        assert "has no checkpoints" in failure(lambda: trainer.fit(X, Y, batch_size=2, epochs=1, resume="x"))
        assert "give a schedule" in failure(lambda: trainer.update_optimizer(learning_rate=0.1))
        trainer.fit(X, Y, batch_size=2, epochs=1, test=(X, Y), callbacks=[EarlyStop("test_loss")])
        assert set(trainer.evaluate(X, Y)) >= {"loss"}

    on_workers("dist_sync", work)


def test_asynchronous_stores_refuse_what_would_hang(mpi_tmp_path):
    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        assert "give every=None" in failure(
            lambda: trainer.fit([(X, Y)], epochs=1, callbacks=[Checkpoint(mpi_tmp_path, every=2)])
        )

    on_workers("dist_async", work)


def test_the_norm_of_a_clients_push_is_known_to_nobody():
    def work(kv):
        said = failure(lambda: Trainer(Line(), kv, "sgd", clip_norm=1.0))
        assert ("none knows its norm" in said) == (kv.num_workers > 1)

    on_workers("mpi_async-1", work)


def test_clipping_in_a_synchronous_store_needs_keys_without_an_optimizer():
    def work(kv):
        kv.set_optimizer("sgd")
        assert "this store has an optimizer for all keys" in failure(lambda: Trainer(Line(), kv, "sgd", clip_norm=1.0))

    on_workers("dist_sync", work)


def test_numbers_of_the_optimizer_are_checked_together():
    def work(kv):
        for clip_norm in (None, 1.0):
            trainer = Trainer(Line(), kv, "sgd", clip_norm=clip_norm)
            assert "rescale is the Trainer's" in failure(lambda trainer=trainer: trainer.update_optimizer(rescale=2.0))
            assert "no option" in failure(lambda trainer=trainer: trainer.update_optimizer(beta=2.0))
            trainer.update_optimizer(learning_rate=0.5)
            rate = -1.0 if kv.rank == 0 else 0.1
            said = failure(lambda trainer=trainer, rate=rate: trainer.update_optimizer(learning_rate=rate))
            assert "learning_rate=-1.0" in said

    on_workers("mpi_sync-0", work)


def test_a_callback_that_fails_closes_the_others():
    closed = []

    class Held(Callback):
        def close(self):
            closed.append(True)

    def rate(epoch):
        return 0.1 if epoch == 1 else 1 / 0

    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        with pytest.raises(ZeroDivisionError):
            trainer.fit(X, Y, batch_size=2, epochs=2, callbacks=[Held(), LearningRate(rate)])
        assert closed

    on_workers("mpi_sync-0", work)
