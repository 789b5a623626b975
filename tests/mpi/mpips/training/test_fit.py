"""`fit` in every kind of store: arrays and iterables, uneven batches, accumulation, clipping, callbacks."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from mpi4py import MPI

from mpips.optimizers import SGD, StepDecay
from mpips.optimizers.equation import Updater
from mpips.training import Callback, EarlyStop, Elastic, LearningRate, Local, Progress, Trainer
from mpips.training.batches import Arrays
from mpips.training.local import OUTER
from tests.mpi.mpips.training.support import ONE_CLIENT, SYNCHRONOUS, Line, data, on_workers, serial, uneven, workers_of
from tests.mpi.sizes import either_mpi

WORLD = MPI.COMM_WORLD
BATCH, EPOCHS = 3, 2
MOMENTUM = SGD(0.05, momentum=0.9)
SERIAL = [*SYNCHRONOUS, *ONE_CLIENT]


class Steps(Callback):
    """Counts what it is called for."""

    def __init__(self):
        self.calls = []

    def on_begin(self, fit):
        self.calls.append("begin")

    def on_step(self, fit):
        self.calls.append(fit.step)

    def on_epoch(self, fit, epoch):
        self.calls.append(f"epoch {epoch.epoch}")

    def on_end(self, fit):
        self.calls.append("end")


class At(Callback):
    """The step at which a fit begins."""

    def on_begin(self, fit):
        self.step = fit.step


@either_mpi
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_an_iterable_of_equal_batches_gives_the_bits_of_arrays(kind):
    x, y = data()

    def work(kv):
        trainers = [Trainer(Line(), kv, MOMENTUM) for _ in range(3)]
        source = Arrays(x, y, BATCH, seed=4)
        trainers[0].fit(x, y, batch_size=BATCH, epochs=EPOCHS, seed=4)
        trainers[1].fit(lambda epoch: source.epoch(epoch, kv), epochs=EPOCHS)
        history = trainers[2].fit(list(source.epoch(1, kv)), epochs=1, on_epoch=lambda epoch: None)
        trainers[2].fit(lambda epoch: source.epoch(2, kv), epochs=1)
        assert history[0].loss > 0
        assert len({trainer.model.bits() for trainer in trainers}) == 1

    on_workers(kind, work)


@either_mpi
@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", SERIAL)
def test_workers_out_of_batches_are_not_counted(kind, accumulate, clip_norm):
    """Each step's gradient is the mean over the samples of those who have any, clipped as a whole."""
    if clip_norm is not None and kind in ONE_CLIENT:
        pytest.skip("the servers apply what nobody knows the norm of")
    workers, steps = workers_of(kind), []
    for epoch in range(1, EPOCHS + 1):
        every = [iter(uneven(worker, epoch)) for worker in range(workers)]
        while batches := [batch for one in every for batch in islice(one, accumulate)]:
            steps.append(batches)
    expected = serial(steps, MOMENTUM, clip_norm)

    def work(kv):
        count = Steps()
        trainer = Trainer(Line(), kv, MOMENTUM, accumulate=accumulate, clip_norm=clip_norm)
        history = trainer.fit(lambda epoch: uneven(kv.rank, epoch), epochs=EPOCHS, callbacks=[count, Progress()])
        for mine, theirs in zip(trainer.model.parameters, expected.parameters):
            np.testing.assert_allclose(mine, theirs, rtol=1e-10, atol=1e-12)
        per_epoch = len(steps) // EPOCHS
        assert count.calls == [
            "begin",
            *range(1, per_epoch + 1),
            "epoch 1",
            *range(per_epoch + 1, len(steps) + 1),
            "epoch 2",
            "end",
        ]
        assert all(np.isnan(epoch.loss) == (kv.rank == 1) for epoch in history)

    on_workers(kind, work)


@either_mpi
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", SERIAL)
def test_a_step_in_which_nobody_has_a_sample_is_not_the_end_of_an_epoch(kind, accumulate):
    x, y = data()

    class Careful(Line):
        def loss_and_gradients(self, x, y):
            if len(x):
                return super().loss_and_gradients(x, y)
            for gradient in self.gradients:
                gradient[...] = np.nan  # the mean of nothing
            return 0.0

    def pair(rank, n):
        return x[n + rank : n + rank + 2], y[n + rank : n + rank + 2]

    workers = workers_of(kind)
    expected = serial([[pair(rank, n) for rank in range(workers)] for n in (0, 7)], MOMENTUM)
    nothing = [(x[:0], y[:0])] * accumulate

    def work(kv):
        trainer = Trainer(Careful(), kv, MOMENTUM, accumulate=accumulate)
        first, second = ([pair(kv.rank, n), *nothing[1:]] for n in (0, 7))
        trainer.fit([*nothing, *first, *nothing, *second], epochs=1, callbacks=[count := Steps()])
        assert count.calls == ["begin", 1, 2, "epoch 1", "end"]
        for found, theirs in zip(trainer.model.parameters, expected.parameters):
            np.testing.assert_allclose(found, theirs, rtol=1e-10, atol=1e-12)

    on_workers(kind, work)


@pytest.mark.parametrize("kind, more", [("dist_async", {}), ("dist_async", {"staleness": 0}), ("mpi_async", {})])
def test_asynchronous_workers_end_with_their_own_batches(kind, more):
    def work(kv):
        trainer = Trainer(Line(), kv, MOMENTUM)
        trainer.fit(lambda epoch: uneven(kv.rank, epoch), epochs=EPOCHS, callbacks=[count := Steps()])
        if kind == "dist_async":
            assert sum(isinstance(call, int) for call in count.calls) == EPOCHS * len(uneven(kv.rank))
        assert np.isfinite(trainer.model.parameters[0]).all()

    on_workers(kind, work, **more)


@either_mpi
@pytest.mark.parametrize("kind", SERIAL)
def test_accumulated_batches_make_the_step_of_a_large_one(kind):
    """The last step of an epoch has what is left; `step` exchanges with every second call."""
    x, y = data()
    workers = workers_of(kind)
    rows = [(np.arange(BATCH * workers) + step * BATCH * workers) % len(x) for step in range(3)]
    steps = [[(x[rows[0]], y[rows[0]]), (x[rows[1]], y[rows[1]])], [(x[rows[2]], y[rows[2]])]]
    expected = serial(steps, MOMENTUM)

    def work(kv):
        mine = [part[kv.rank * BATCH :][:BATCH] for part in rows]
        trainers = [Trainer(Line(), kv, MOMENTUM, accumulate=2) for _ in range(2)]
        for part in mine:
            before = trainers[0].model.bits()
            trainers[0].step(x[part], y[part])
            assert (trainers[0].model.bits() == before) == (part is not mine[1])
        trainers[0].fit([], epochs=0, callbacks=[count := Steps(), at := At()])  # takes what `step` has left
        assert count.calls == ["begin", "end"] and at.step == 2
        trainers[1].fit([(x[part], y[part]) for part in mine], epochs=1)
        for trainer in trainers:
            for found, theirs in zip(trainer.model.parameters, expected.parameters):
                np.testing.assert_allclose(found, theirs, rtol=1e-10, atol=1e-12)

    on_workers(kind, work)


@either_mpi
@pytest.mark.parametrize("kind", [*SYNCHRONOUS, "dist_async"])
def test_the_mean_gradient_is_clipped_by_its_global_norm(kind):
    x, y = data()
    workers = workers_of(kind)
    mini = BATCH * workers
    steps = [[(x[at : at + mini], y[at : at + mini])] for at in range(0, 3 * mini, mini) if at + mini <= len(x)]
    expected = serial(steps, MOMENTUM, 0.5)

    def work(kv):
        model = Line()
        trainer = Trainer(model, kv, MOMENTUM, clip_norm=0.5)
        for [(batch_x, batch_y)] in steps:
            mine = slice(kv.rank * BATCH, (kv.rank + 1) * BATCH)
            trainer.step(batch_x[mine], batch_y[mine])
        if kind == "dist_async" and kv.num_workers > 1:  # each push was clipped, and others moved the parameters
            assert np.sqrt(sum((array**2).sum() for array in model.gradients)) <= 0.5 + 1e-12
            return
        for found, theirs in zip(model.parameters, expected.parameters):
            np.testing.assert_allclose(found, theirs, rtol=1e-10, atol=1e-12)

    on_workers(kind, work)


@either_mpi
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_elastic_averaging_clips_the_mean_of_a_client(clip_norm):
    """At an interval that does not come, a client's SGD is the serial one."""
    workers = workers_of("mpi_async-1")
    x, y = data()
    steps = [[(x[at : at + BATCH * workers], y[at : at + BATCH * workers])] for at in (0, 1, 2)]
    expected = serial(steps, MOMENTUM, clip_norm)

    def work(kv):
        trainer = Trainer(Line(), kv, MOMENTUM, elastic=Elastic(alpha=1.0, interval=99), clip_norm=clip_norm)
        for [(batch_x, batch_y)] in steps:
            trainer.step(*(array[kv.rank * BATCH :][:BATCH] for array in (batch_x, batch_y)))
        for found, theirs in zip(trainer.model.parameters, expected.parameters):
            np.testing.assert_allclose(found, theirs, rtol=1e-10, atol=1e-12)

    on_workers("mpi_async-1", work)


@either_mpi
@pytest.mark.parametrize("clip_norm", [None, 1e6])
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_a_rate_of_epochs_is_a_schedule_of_steps(kind, clip_norm):
    """The callback and the optimizer's own schedule give the same bits, on servers and here."""
    x, y = data()
    steps = len(x) // (BATCH * workers_of(kind))

    def work(kv):
        models = [Line(), Line()]
        rates = LearningRate(lambda epoch: 0.05 * 0.5 ** (epoch - 1))
        one = Trainer(models[0], kv, "sgd", learning_rate=9.0, clip_norm=clip_norm)
        one.fit(x, y, batch_size=BATCH, epochs=3, callbacks=[rates])
        other = Trainer(models[1], kv, "sgd", learning_rate=StepDecay(0.05, steps, 0.5), clip_norm=clip_norm)
        other.fit(x, y, batch_size=BATCH, epochs=3)
        assert models[0].bits() == models[1].bits()

    on_workers(kind, work)


@pytest.mark.parametrize("kind", ["dist_sync", "mpi_sync-0", "dist_async"])
def test_all_workers_stop_at_the_same_epoch(kind):
    """Though each sees another loss: on rank 0 it falls, on the others it grows faster."""
    x, y = data()

    def work(kv):
        model, calls = Line(), []
        compute = model.loss_and_gradients

        def seen(x, y):
            calls.append(compute(x, y))
            return len(calls) * (-1.0 if kv.rank == 0 else 2.0)

        model.loss_and_gradients = seen
        history = Trainer(model, kv, MOMENTUM).fit(
            x, y, batch_size=BATCH, epochs=9, callbacks=[EarlyStop("loss", patience=2)]
        )
        told = kv.worker.agree("test", data=str(len(history)).encode())
        assert set(told) == {b"3" if kv.num_workers > 1 else b"9"}

    on_workers(kind, work)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["dist_sync", "mpi_sync-0", "mpi_async"])
def test_seconds_are_of_training_alone_on_every_rank(kind):
    """Rank 0 takes its time between epochs, for which the others wait; nobody counts it (fault 32)."""
    x, y = data()

    class Slow(Callback):
        def on_epoch(self, fit, epoch):
            if fit.rank == 0 and epoch.epoch == 1:
                time.sleep(0.3)

    def work(kv):
        trainer = Trainer(Line(), kv, MOMENTUM)
        begun = time.perf_counter()
        history = trainer.fit(x, y, batch_size=BATCH, epochs=3, test=(x, y), callbacks=[Slow()])
        passed = time.perf_counter() - begun
        assert [epoch.epoch for epoch in history] == [1, 2, 3]
        assert 0 < history[0].seconds < history[1].seconds < history[2].seconds
        if kv.rank == 0 or kind != "mpi_async":  # asynchronous workers do not wait for rank 0
            assert history[2].seconds < passed - 0.25

    on_workers(kind, work)


@either_mpi
@pytest.mark.parametrize("outer", ["average", "nesterov"])
@pytest.mark.parametrize("kind, quorum", [("dist_sync", False), ("dist_sync-0", False), ("dist_async", True)])
def test_clients_train_apart_and_have_the_bits_of_a_serial_run(kind, quorum, outer):
    """Clients of one worker each, which all begin alike; an outer step every second step. `quorum`: of all."""
    workers, steps, every = workers_of(kind), 6, 2
    x, y = data()

    def part(step, worker):
        at = (step * workers + worker) * BATCH % (len(x) - BATCH)
        return x[at : at + BATCH], y[at : at + BATCH]

    models = [Line() for _ in range(workers)]
    centers = [array.copy() for array in Line().parameters]
    outers = Updater(replace(OUTER[outer], rescale=1 / workers), centers)
    inners = [Updater(MOMENTUM, model.parameters) for model in models]
    for step in range(steps):
        for worker, (model, inner) in enumerate(zip(models, inners)):
            model.loss_and_gradients(*part(step, worker))
            inner.update(model.gradients)
        if step % every == every - 1:
            outers.update(
                [sum_of([center - model.parameters[place] for model in models]) for place, center in enumerate(centers)]
            )
            for model in models:
                for mine, center in zip(model.parameters, centers):
                    mine[...] = center

    def work(kv):
        model = Line()
        trainer = Trainer(model, kv, MOMENTUM, local=Local(every=every, outer=outer))
        for step in range(steps):
            trainer.step(*part(step, kv.rank))
        assert model.bits() == models[kv.rank].bits()

    on_workers(kind, work, **({"quorum": workers, "grace_seconds": 5} if quorum else {}))


def sum_of(arrays):
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def test_one_client_of_all_workers_is_refused():
    def work(kv):
        if kv.num_workers > 1:
            with pytest.raises(ValueError, match="in one client, which sum in each step: take dist_sync"):
                Trainer(Line(), kv, MOMENTUM, local=Local(every=2))

    on_workers("mpi_sync-0", work)


def test_clients_apart_refuse_batches_that_may_end_unlike():
    def work(kv):
        trainer = Trainer(Line(), kv, MOMENTUM, local=Local(every=2))
        with pytest.raises(ValueError, match="fit: with local= a store of kind dist_sync waits for a worker"):
            trainer.fit([data()], epochs=1)

    on_workers("dist_sync", work)
