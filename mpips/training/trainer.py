"""`Trainer`: a training loop for users who do not want to write their own (MXNET-MPI, section 5, figures 6 to 8)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpips.collectives.errors import NotCopyable
from mpips.optimizers.base import Optimizer
from mpips.optimizers.registry import create
from mpips.overlap.exchange import Overlapped, OverlapReport
from mpips.overlap.measure import job_profile
from mpips.overlap.messages import check_model
from mpips.overlap.problem import Profile, save_profile
from mpips.samples import SampleRows, table
from mpips.store.api import KVStore
from mpips.store.runtime.rendezvous import attempt
from mpips.training import checkpoint
from mpips.training.batches import BLOCK, Source, check_samples, source_of
from mpips.training.callbacks import Callback, of_job
from mpips.training.checkpoint import Epoch, Position
from mpips.training.evaluation import Metric, check_metrics, compared_test, evaluate
from mpips.training.local import Elastic, Local, averaged, workers_in_a_sum
from mpips.training.loop import Fit, begin, check_arguments, compared_arguments
from mpips.training.model import Model, Samples, check_method, check_model_arrays
from mpips.training.recovery import check_alike
from mpips.training.rejoin import survival_of
from mpips.training.step import Blocking, TrainerParts, update_optimizer
from mpips.training.updates import ClientUpdate, StoreUpdate, Update, WorkerUpdate, check_clip


class Trainer(NotCopyable):
    """Trains a model through a store: synchronous, asynchronous or elastic, with servers or without.

        kv = mpips.create("dist_sync")
        trainer = mpips.Trainer(model, kv, "sgd", learning_rate=0.1)
        history = trainer.fit(x, y, batch_size=32, epochs=20)
        kv.close()

    Every worker starts from rank 0's parameters. If the store survives deaths of processes (option `spares`), `fit`
    continues after a death. A death outside of `fit` raises an error.

    Creating a Trainer is collective over all workers and blocking. All workers must pass equal arguments.

    Args:
        model: An `mpips.Model`: parameters, gradients, and a function that fills the gradients.
        kv: The store, from `mpips.create`.
        optimizer: An Optimizer, or the name of one. Its gradient is the mean over the samples of all workers that
            contribute to an update. A hyperparameter may be a schedule:
            `learning_rate=mpips.optimizers.Cosine(0.1, 1000)`.
        elastic: Elastic averaging. It needs an asynchronous store.
        local: An `mpips.training.Local`, for local SGD or DiLoCo. Each client (a group of workers) trains by itself.
            After every `local.every` steps the store's outer optimizer applies the changes that the clients have made.
        overlap: Exchange some gradients while others are still being computed. The value is a strategy of `mpips plan`,
            or "auto", which measures the job and chooses the best strategy. The model must consist of layers
            (`mpips.overlap.LayeredModel`, such as `MLP`). The store must not be one that survives deaths.
        clip_norm: The largest global norm of a gradient. In a synchronous store it applies to the mean over all
            workers. The store then only sums gradients. Every worker keeps the optimizer's state and updates its own
            parameters, with equal results. With `elastic` or `local`, `clip_norm` applies to the mean over the client's
            workers. In other asynchronous stores it applies to each push, and every client must have one worker.
        accumulate: The number of batches that a worker computes for one exchange. The gradient is the mean over all
            samples of these batches.
        metrics: A dict of functions of (outputs, y) by name, for `evaluate` and `fit(test=)`. A function returns a
            value for each sample, or the mean of these values.
        grow: True to turn waiting spares into workers during the first `fit`, at the end of the current epoch.
        options: The options of the optimizer, if `optimizer` is a name.

    Raises:
        ValueError, TypeError: An argument is invalid or differs between workers. All workers raise it, before anything
            is sent.
    """

    def __init__(
        self,
        model: Any,
        kv: KVStore,
        optimizer: str | Optimizer = "sgd",
        *,
        elastic: Elastic | None = None,
        local: Local | None = None,
        overlap: str | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        metrics: Mapping[str, Metric] | None = None,
        grow: bool = False,
        **options: Any,
    ) -> None:
        if not isinstance(kv, KVStore):
            raise TypeError(f"a Trainer trains through a store, as mpips.create makes it, not {type(kv).__name__}")

        def checked() -> tuple[Optimizer, dict[str, Metric]]:
            if local is not None:
                _check_local(kv, local, elastic, overlap)
            limit = check_clip(clip_norm)
            _check_options(kv, elastic, overlap, None if local else limit, accumulate)
            # With overlap, Overlapped checks the model.
            if overlap is None:
                check_model_arrays(model)
            made = create(optimizer, **options)
            # This raises an error unless the optimizer has the field `rescale`.
            averaged(made, 1)
            return made, check_metrics(metrics, model)

        checked_arguments, refusal = attempt(checked)
        made, measures = checked_arguments if checked_arguments is not None else (None, {})
        options_by_name = {
            "optimizer": made,
            "elastic": elastic,
            "local": local,
            "overlap": overlap,
            "clip_norm": clip_norm,
            "accumulate": accumulate,
            "metrics": sorted(measures),
            "grow": bool(grow),
        }
        # arguments that must be equal on all workers
        self._compared = [(name, repr(value)) for name, value in options_by_name.items()]
        check_alike(kv, "Trainer", self._compared, refusal)
        self.model = model
        self.kv = kv
        self._grow = bool(grow)
        self.exchange: Blocking | Overlapped
        steps: Blocking | None = None
        if overlap is None:
            self.exchange = steps = Blocking(model, _update_of(model, kv, made, elastic, local, clip_norm), accumulate)
        else:
            self.exchange = Overlapped(model, kv, averaged(made, workers_in_a_sum(kv)), overlap)
        self._parts = TrainerParts(model, kv, self.exchange, steps, measures)
        self._position = Position()
        self._fits = 0
        # positions of all workers in the checkpoint that the next fit continues from, or ()
        self._resumed: Sequence[Position] = ()

    # ---- training

    def step(self, x: Samples, y: Samples) -> float:
        """Train on one batch of this worker. Blocks until the parameters are updated.

        All workers of a synchronous store must call it equally often. In an asynchronous store, only the workers of the
        same client must. With `accumulate=k` every k-th call exchanges gradients, and the other calls are local.

        Args:
            x: Inputs, (samples, ...).
            y: Targets, (samples, ...).

        Returns:
            The mean loss of the batch, before the update.

        Raises:
            ValueError: The batch is empty, so it has no mean loss.
        """
        if getattr(x if y is None else y, "shape", (1,))[:1] == (0,):
            raise ValueError(
                f"step: the batch of rank {self.kv.rank} has no sample, so no mean: give it some, or fit "
                "batches, of which some may be empty"
            )
        loss = self.exchange.step(x, y)
        self.exchange.finish()
        self._position.step += 1 if self._parts.blocking is None or not self._parts.blocking.waiting else 0
        return loss

    def fit(
        self,
        x: Samples,
        y: Samples = None,
        *,
        batch_size: int | None = None,
        epochs: int,
        seed: int = 0,
        steps: int | None = None,
        test: Any = None,
        callbacks: Sequence[Callback] = (),
        on_epoch: Callable[[Epoch], object] | None = None,
        resume: str | os.PathLike[str] | None = None,
    ) -> list[Epoch]:
        """Train for some epochs. Collective over all workers, blocking.

        Data can be given in two ways:

        1. x and y are arrays (samples, ...), the same on every worker, with `batch_size`. Each epoch has a new order of
           the samples, made from `seed`, and each worker takes its share. Samples that do not fill a mini-batch of all
           workers are left out of the epoch.
        2. x gives this worker's own batches (x, y), and y is None. Workers may have different numbers of batches. A
           worker that has used all its batches contributes nothing, and the mean is over the samples of the other
           workers. To count these samples, a synchronous step also sums two numbers. An asynchronous worker does not
           wait for any other worker.

        Args:
            x: Inputs, (samples, ...). Data frames, sparse matrices and arrays on disk are also accepted, and their rows
                are taken by position. Or batches: an iterable that can be iterated in every epoch (a list, a
                DataLoader), or a function that takes the number of the epoch (from 1) and returns an iterable.
            y: Targets, (samples, ...). None if x gives batches.
            batch_size: The number of samples that a worker takes in a step. For arrays only.
            epochs: The total number of epochs, including those before a resume.
            seed: The seed for the order of the samples.
            steps: The largest number of steps in an epoch. For batches only. An endless stream needs this limit. An
                iterator continues in the next epoch where it stopped.
            test: A pair of arrays, or batches, to measure after each epoch. All workers measure together, except in an
                asynchronous store, where each worker measures alone with its current parameters.
            callbacks: `mpips.training.Callback` objects.
            on_epoch: A function that is called with the `Epoch` after each epoch.
            resume: A folder that `Checkpoint` has written. Training continues from the newest checkpoint in it, if it
                has any. In a synchronous store the result has the same bits as without the interruption.

        Returns:
            The history: an `Epoch` for each epoch, including those before a resume.

        Raises:
            ValueError, TypeError: An argument is invalid or differs between workers. All workers raise it, before the
                first step.
            StoreError: A process has died, and the store does not survive deaths or has lost data.
        """
        callbacks, resume = of_job(self.kv, callbacks, resume)
        arguments, refusal = attempt(
            lambda: check_arguments(
                self._parts,
                x,
                y,
                batch_size,
                epochs,
                seed,
                steps,
                test,
                callbacks,
                on_epoch,
                resume,
                self.kv.spares if self._grow and not self._fits else 0,
            )
        )
        compared = compared_arguments(arguments, resume)
        check_alike(self.kv, "fit", compared, refusal)
        if not self.kv.worker.fresh:
            own = self._resumed or [Position(step=self._position.step)]
            before, self._resumed = self._position.step, ()
            self._position = begin(self._parts, arguments, resume, own)
            if self._position.step != before and self.kv.rank == 0:
                print(f"mpips: fit goes on from step {self._position.step}, saved in {resume}", file=sys.stderr)
        # A spare begins with its first fit. If the other workers are in a later fit, the numbers of the fits differ,
        # and all workers raise an error.
        self._fits += 1
        survival = survival_of(self._parts, arguments.source, self._fits, [*self._compared, *compared], self._grow)
        return Fit(self._parts, arguments, self._position, survival).run()

    def update_optimizer(self, **numbers: Any) -> None:
        """Change hyperparameters of the optimizer, from the next exchange on. Its state stays. Collective, blocking.

            trainer.update_optimizer(learning_rate=0.01)

        Raises:
            ValueError, TypeError: A hyperparameter is invalid or differs between workers. All workers raise it, and
                nothing has changed.
        """
        update_optimizer(self._parts, numbers)

    # ---- evaluation

    def evaluate(self, x: Samples, y: Samples = None, *, batch_size: int = BLOCK) -> dict[str, float]:
        """Measure the loss and the metrics on test data. Collective over all workers, blocking.

            result = trainer.evaluate(test_x, test_y)  # {"loss": 0.31, "accuracy": 0.91}

        Sums are in float64 and added in rank order, so they are exact up to rounding, however unevenly the samples are
        shared out. In an asynchronous store all workers first take the servers' parameters. With `elastic`, `local` or
        `overlap` they do not: each worker measures with its own parameters.

        Args:
            x: Inputs (samples, ...), the same on every worker. Each worker computes a share. Or, without y, this
                worker's own batches (x, y).
            y: Targets (samples, ...), or None if x gives batches.
            batch_size: The number of samples to compute at a time. For arrays only.

        Returns:
            A dict with "loss" and the metrics by name. The values are means over all samples, equal on every worker.

        Raises:
            ValueError, TypeError: An argument is invalid or differs between workers, or a metric fails on a worker. All
                workers raise it.
        """

        def checked_source() -> Source:
            test = source_of(x, y, None if y is None else batch_size, 0, "evaluate")
            check_samples(self.model, test)
            return test

        source, refusal = attempt(checked_source)
        self.kv.worker.agree("evaluate", compared_test(source), refusal, noun="argument")
        self.exchange.finish()
        return evaluate(self._parts, source)

    def predict(self, x: Samples) -> np.ndarray:
        """Return the model's outputs (samples, ...) for x (samples, ...), with this worker's parameters. Local.

        Raises TypeError if the model has no `predict`, or if rows of x cannot be taken by position.
        """
        check_method(self.model, "predict", "predict")
        self.exchange.finish()
        rows = table("predict: x", x) if hasattr(x, "shape") else x
        if not isinstance(rows, SampleRows):
            outputs: np.ndarray = self.model.predict(rows)
            return outputs
        starts = range(0, max(len(rows), 1), BLOCK)
        return np.concatenate([self.model.predict(rows[start : start + BLOCK]) for start in starts])

    # ---- checkpoints

    def save(self, path: str | os.PathLike[str], keep: int | None = None) -> str:
        """Write a checkpoint into a folder, in a training loop of your own. In `fit`, use the callback `Checkpoint`.

        Collective, blocking. Call it between two steps.

            trainer.save("out/mine", keep=2)

        Args:
            path: The folder. It is created if it does not exist.
            keep: The number of newest checkpoints that stay. None keeps all.

        Returns:
            The path of the checkpoint's files, without their endings.

        Raises:
            ValueError, TypeError: The checkpoint cannot be written. Every worker raises it, and older checkpoints stay.
        """
        return checkpoint.save(self._parts, path, self._position, keep)

    def resume(self, path: str | os.PathLike[str]) -> int:
        """Load a checkpoint. The next `step` or `fit` continues from it. Collective, blocking.

        Args:
            path: A folder, whose newest checkpoint is taken, or one file step-*.trainer.safetensors.

        Returns:
            The step of the checkpoint.

        Raises:
            ValueError, TypeError: `path` has no checkpoint, or the checkpoint does not fit this Trainer. Every worker
                raises it, and nothing has changed.
        """
        found = checkpoint.find(self._parts, path)
        # Without begin=True, find() raises an error if the folder has no checkpoint.
        assert found is not None
        checkpoint.take(self._parts, found)
        self._position, self._resumed = checkpoint.position_of(found.positions, self.kv.rank), found.positions
        return self._position.step

    # ---- speed

    def report(self) -> OverlapReport:
        """Return the times of the last steps on this worker. Local.

        The report has the measured and the predicted seconds of an iteration, the groups of layers whose gradients
        travel together, and the tasks of the last step (`save_trace`, `save_picture`).

        Raises:
            RuntimeError: The first step has not ended yet.
        """
        return self.exchange.report()

    def profile(self, x: np.ndarray, y: np.ndarray, save: str | Path | None = None) -> Profile:
        """Measure this job: the time of each layer on a batch, and of messages through the store. Collective, blocking.

        Gradients are overwritten. Parameters do not change.

        Args:
            x: Inputs of the batch, (samples, ...).
            y: Targets, (samples, ...).
            save: The file that rank 0 writes the profile to, for `mpips plan`. None writes no file.

        Returns:
            The profile.

        Raises:
            ValueError: The model does not consist of layers (see `overlap`), or the Trainer has `elastic`.
        """
        check_model(self.model, "profile")
        if self._parts.blocking is not None and self._parts.blocking.update.name == "none, elastic":
            raise ValueError("elastic averaging sends its model whole, every few iterations: there is nothing to plan")
        if isinstance(self.exchange, Overlapped):
            profile = self.exchange.measure(x, y)
        else:
            profile = job_profile(self.model, self.kv, x, y)
        if save is not None and self.kv.rank == 0:
            save_profile(profile, save)
        return profile


def _update_of(
    model: Model, kv: KVStore, made: Optimizer, elastic: Elastic | None, local: Local | None, clip_norm: float | None
) -> Update:
    """Return the object that turns the gradients of a step into the next parameters."""
    if (rule := elastic or local) is not None:
        return ClientUpdate(model, kv, made, rule, clip_norm)
    if clip_norm is not None and not kv.layout.asynchronous:
        return WorkerUpdate(model, kv, made, clip_norm)
    return StoreUpdate(model, kv, made, clip_norm)


def _check_local(kv: KVStore, local: Local, elastic: Elastic | None, overlap: str | None) -> None:
    """Raise TypeError or ValueError for options that do not fit `local`."""
    if not isinstance(local, Local):
        raise TypeError(f"local={local!r}: give an mpips.training.Local, as Local(every=500)")
    if elastic is not None or overlap is not None:
        other = f"elastic={elastic}" if elastic is not None else f"overlap={overlap!r}"
        raise ValueError(f"local and {other} are two ways to exchange: leave one of the two out")
    if local.delay:
        raise ValueError(
            f"local: delay={local.delay} is for mpips.torch.LocalSGD, as a checkpoint of a Trainer holds "
            "nothing that is under way: give delay=0"
        )
    if kv.layout.survives and len(kv.layout.clients) < kv.num_workers:
        raise ValueError(
            f"local: with spares each client has one worker, and this {kv.type} store has "
            f"{kv.num_workers} in {len(kv.layout.clients)} clients: take dist_sync or dist_async, or "
            "leave spares out"
        )
    if kv.num_workers > 1 and len(kv.layout.clients) == 1:
        raise ValueError(
            f"local: all {kv.num_workers} workers of this {kv.type} store are in one client, which sum in "
            "each step: take dist_sync, or several clients"
        )
    # This raises an error unless the optimizer has the field `rescale`.
    averaged(local.optimizer, 1)


def _check_options(
    kv: KVStore, elastic: Elastic | None, overlap: str | None, clip_norm: float | None, accumulate: int
) -> None:
    """Raise ValueError for options that do not fit together."""
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r}: give a number of batches, at least 1")
    if overlap is not None and kv.layout.survives:
        raise ValueError(
            f"overlap={overlap!r} does not survive deaths yet, and this store does: leave overlap out, or "
            "the option spares"
        )
    if elastic is not None and overlap is not None:
        raise ValueError(f"elastic={elastic} has nothing to overlap: leave overlap={overlap!r} out")
    if elastic is not None and not kv.layout.asynchronous:
        raise ValueError(f"elastic averaging needs a store of kind dist_async or mpi_async, not {kv.type}")
    if overlap is not None and (clip_norm is not None or accumulate > 1):
        option = f"clip_norm={clip_norm}" if clip_norm is not None else f"accumulate={accumulate}"
        raise ValueError(
            f"{option} needs all gradients of a step before the first is sent, and overlap={overlap!r} "
            "sends them one by one: leave one of the two out"
        )
    if clip_norm is None or elastic is not None:
        return
    if not kv.layout.asynchronous and kv.worker.groups.default is not None:
        raise ValueError(
            f"clip_norm={clip_norm}: in a synchronous store the workers update, and this store has an "
            "optimizer for all keys: set it for keys=[...], or not at all"
        )
    if kv.layout.asynchronous and len(kv.layout.clients) < kv.num_workers:
        raise ValueError(
            f"clip_norm={clip_norm}: in {kv.type} the servers apply the sum of a client, and of "
            f"{kv.num_workers} workers in {len(kv.layout.clients)} clients none knows its norm: take "
            "dist_async, elastic averaging, or a synchronous kind"
        )
