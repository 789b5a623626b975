"""`evaluate`, `fit(test=)` and `predict`: shares of workers, metrics of the user's, what a model lacks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mpips.training import Elastic, Trainer
from tests.mpi.mpips.support import failure
from tests.mpi.mpips.training.support import KINDS, Line, data, on_workers, uneven
from tests.mpi.sizes import either_mpi

FAR = {"far": lambda outputs, y: np.abs(outputs - y).mean(axis=1), "mean": lambda outputs, y: (outputs - y).mean()}


def expected(model, x, y):
    far = model.predict(x) - y
    return {"loss": (far**2).sum() / len(x), "far": np.abs(far).mean(), "mean": far.mean()}


@either_mpi
@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_workers_measure_the_whole_of_it(kind, elastic):
    if elastic and not kind.endswith("async-1"):
        pytest.skip("clients have parameters of their own")
    x, y = data()

    def work(kv):
        model = Line()
        trainer = Trainer(model, kv, "sgd", learning_rate=0.05, metrics=FAR, elastic=Elastic() if elastic else None)
        trainer.fit(x, y, batch_size=2, epochs=1)
        found = [trainer.evaluate(x, y), trainer.evaluate(x, y, batch_size=3)]
        assert all(one == pytest.approx(expected(model, x, y), rel=1e-12) for one in found)
        batches = [batch for worker in range(kv.num_workers) for batch in uneven(worker)]
        together = [np.concatenate(arrays) for arrays in zip(*batches)]
        found.append(trainer.evaluate(uneven(kv.rank)))
        assert found[-1] == pytest.approx(expected(model, *together), rel=1e-12)
        assert len(set(kv.worker.agree("test", data=json.dumps(found).encode()))) == 1
        np.testing.assert_array_equal(trainer.predict(x), model.predict(x))

    on_workers(kind, work)


@either_mpi
@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_measures_a_model_that_has_no_accuracy(kind):
    """Fault 13: an epoch was trained, and then came AttributeError."""
    x, y = data()

    def work(kv):
        model = Line()
        history = Trainer(model, kv, "sgd").fit(x, y, batch_size=2, epochs=2, test=(x[:7], y[:7]))
        assert [set(epoch.test) for epoch in history] == [{"loss"}, {"loss"}]
        if not kind.endswith("async"):
            assert history[-1].test["loss"] == pytest.approx(expected(model, x[:7], y[:7])["loss"], rel=1e-12)

    on_workers(kind, work)


@either_mpi
@pytest.mark.parametrize("part", ["metric", "predict"])
@pytest.mark.parametrize("kind", ["dist_sync", "mpi_sync-0"])
def test_whatever_one_worker_raises_is_told_to_all(kind, part):
    """In `evaluate` and in a fit; where it was raised it is the cause. The store goes on."""
    x, y = data()

    def work(kv):
        def bad(*arrays):
            if kv.rank == kv.num_workers - 1:
                raise KeyError("no such class")
            return 1.0

        model = Line()
        trainer = Trainer(model, kv, "sgd", metrics={"bad": bad if part == "metric" else lambda outputs, y: 1.0})
        if part == "predict":
            model.predict = bad
            model.loss = lambda x, y: 1.0
        for call in (
            lambda: trainer.evaluate(x, y),
            lambda: trainer.fit(x, np.ones((len(x), 2)), batch_size=2, epochs=1, test=(x, y)),
        ):
            model.loss_and_gradients = lambda x, y: 1.0
            with pytest.raises(ValueError, match="evaluate: KeyError: 'no such class'") as caught:
                call()
            if kv.num_workers > 1:
                assert f"rank {kv.num_workers - 1}: " in str(caught.value)
            assert isinstance(caught.value.__cause__, KeyError) == (kv.rank == kv.num_workers - 1)
        kv.barrier()

    on_workers(kind, work)


@pytest.mark.parametrize("kind", ["dist_sync", "mpi_sync-0"])
def test_what_is_missing_or_fails_is_told_to_all_and_the_store_goes_on(kind):
    x, y = data()

    class Mute(Line):
        predict = None

        def loss_and_gradients(self, x, y):
            return 0.0

    def work(kv):
        sentence = "metrics= needs a model with predict, which Mute has not"
        assert sentence in failure(lambda: Trainer(Mute(), kv, "sgd", metrics=FAR))
        trainer = Trainer(Mute(), kv, "sgd")
        assert "predict needs a model with predict" in failure(lambda: trainer.predict(x))
        assert set(trainer.evaluate(x, y)) == {"loss"}

        trainer = Trainer(Line(), kv, "sgd")
        assert "50 inputs, but 49 targets" in failure(lambda: trainer.evaluate(x, y[1:]))
        assert trainer.step(x, y) > 0

    on_workers(kind, work)
