"""`Trainer`: the loops of examples/ for users who do not want to write one (MXNET-MPI, section 5, figures 6 to 8)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpips.collectives.errors import Uncopied
from mpips.optimizers.base import Optimizer
from mpips.optimizers.registry import create
from mpips.overlap.exchange import Overlapped, Report
from mpips.overlap.measure import job_profile
from mpips.overlap.messages import check_model
from mpips.overlap.problem import Profile, save_profile
from mpips.samples import Rows, table
from mpips.store.api import KVStore
from mpips.store.runtime.rendezvous import attempt
from mpips.training import checkpoint
from mpips.training.batches import BLOCK, Source, see_samples, source_of
from mpips.training.callbacks import Callback, of_job
from mpips.training.checkpoint import Epoch, Position
from mpips.training.evaluation import Metric, check_metrics, evaluate, test_words
from mpips.training.local import Elastic, Local, averaged, workers_in_a_sum
from mpips.training.loop import Fit, begin, requested, words_of
from mpips.training.model import Model, Samples, see_method, see_model
from mpips.training.rejoin import see_alike, survival_of
from mpips.training.step import Blocking, Job, update_optimizer
from mpips.training.updates import ElasticAveraging, Gradients, LocalTraining, Summed, Update, check_clip


class Trainer(Uncopied):
    """Trains `model` through a store: synchronous, asynchronous or elastic, with servers or without.

    optimizer   a name with options, or an Optimizer; its gradient is the mean over the samples of all workers that
                contribute to an update. A number may be a schedule: `learning_rate=mpips.optimizers.Cosine(0.1, 1000)`.
    elastic     elastic averaging; needs an asynchronous store.
    local       an `mpips.training.Local`: each client trains apart, and every so many steps the store's outer optimizer
                takes what the clients have changed (local SGD, DiLoCo).
    overlap     exchange beside the compute, by a strategy of `mpips plan` or "auto", which measures the job and takes
                the best; the model then is one in layers (`mpips.overlap.LayeredModel`, as `MLP` is).
    clip_norm   the largest global norm of a gradient. Of which: synchronous kinds, the mean over all workers; then
                every worker updates, alike, and keeps the optimizer's state, and the store only sums. Elastic, the mean
                over the client's workers. Other asynchronous stores, a push; their clients must have one worker each.
    accumulate  so many batches of a worker make one exchange, of the mean over all their samples.
    metrics     functions of (outputs, y) by name, for `evaluate` and `fit(test=)`: a value a sample, or the mean.
    grow        spares that wait become workers in the first `fit`, after the epoch of training that is under way.

    Where the store survives deaths (`spares`), `fit` goes on after one; outside of it one raises. `overlap` is refused.

    Every worker starts from rank 0's parameters. Collective over all workers, which give equal arguments, and call
    `step` equally often. All raise ValueError or TypeError before anything is sent where one is wrong or differs.
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

        def chosen() -> tuple[Optimizer, dict[str, Metric]]:
            if local is not None:
                _see_local(kv, local, elastic, overlap)
            _see_together(kv, elastic, overlap, None if local else check_clip(clip_norm), accumulate)
            if overlap is None:  # otherwise it is a model in layers, which Overlapped checks
                see_model(model)
            made = create(optimizer, **options)
            averaged(made, 1)  # it has a rescale
            return made, check_metrics(metrics, model)

        found, refusal = attempt(chosen)
        made, measures = found if found is not None else (None, {})
        words = {
            "optimizer": made,
            "elastic": elastic,
            "local": local,
            "overlap": overlap,
            "clip_norm": clip_norm,
            "accumulate": accumulate,
            "metrics": sorted(measures),
            "grow": bool(grow),
        }
        self._words = [(name, repr(word)) for name, word in words.items()]
        see_alike(kv, "Trainer", self._words, refusal)
        self.model, self.kv, self._grow = model, kv, bool(grow)
        self.exchange: Blocking | Overlapped
        steps: Blocking | None = None
        if overlap is None:
            self.exchange = steps = Blocking(model, _update_of(model, kv, made, elastic, local, clip_norm), accumulate)
        else:
            self.exchange = Overlapped(model, kv, averaged(made, workers_in_a_sum(kv)), overlap)
        self._job = Job(model, kv, self.exchange, steps, measures)
        self._position, self._fits = Position(), 0
        self._resumed: Sequence[Position] = ()  # of all workers of the checkpoint that the next fit goes on from

    # ---- training

    def step(self, x: Samples, y: Samples) -> float:
        """One iteration on this worker's batch, blocking until its parameters are the new ones; the batch's loss.

        All workers of a synchronous store (of a client) call it equally often. With `accumulate=k` every k-th call
        exchanges.
        """
        if getattr(x if y is None else y, "shape", (1,))[:1] == (0,):
            raise ValueError(
                f"step: the batch of rank {self.kv.rank} has no sample, so no mean: give it some, or fit "
                "batches, of which some may be empty"
            )
        loss = self.exchange.step(x, y)
        self.exchange.finish()
        self._position.step += 1 if self._job.blocking is None or not self._job.blocking.waiting else 0
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
        """Train; the history, an `Epoch` each.

        x, y        arrays (samples, ...), the same on every worker, with `batch_size` samples a worker and step. Rows
                    are taken by position, of frames, sparse matrices and arrays on disk, too. Every epoch is a new
                    order of the samples, by `seed`, of which each worker takes its share; samples that do not fill a
                    mini-batch of all workers wait for another epoch.
                    Or x alone: this worker's batches (x, y), an iterable that can be gone through in every epoch (a
                    list, a DataLoader), or a function of the epoch, from 1, that returns one. Workers may have unlike
                    numbers of batches: who is out of them contributes nothing, and the mean is over the samples of the
                    others. For that a synchronous step sums two numbers more. An asynchronous worker waits for nobody.
        steps       with batches: the steps of an epoch, at most. A stream without end needs it; an iterator goes on in
                    the next epoch.
        test        a pair of arrays, or batches, measured after each epoch: by all workers together; in an asynchronous
                    store by each alone, with its parameters of that moment.
        callbacks   `mpips.training.Callback` objects. on_epoch: a function that is called with each Epoch.
        resume      a folder of `Checkpoint`: go on from its newest one, if any. With the same bits, where synchronous.

        Collective; ValueError or TypeError on every worker where arguments are wrong, or differ between workers.
        """
        callbacks, resume = of_job(self.kv, callbacks, resume)
        request, refusal = attempt(
            lambda: requested(
                self._job,
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
        words = words_of(request, resume)
        see_alike(self.kv, "fit", words, refusal)
        if not self.kv.worker.fresh:
            own = self._resumed or [Position(step=self._position.step)]
            before, self._resumed = self._position.step, ()
            self._position = begin(self._job, request, resume, own)
            if self._position.step != before and self.kv.rank == 0:
                print(f"mpips: fit goes on from step {self._position.step}, saved in {resume}", file=sys.stderr)
        self._fits += 1  # a spare begins with the first
        survival = survival_of(self._job, request.source, self._fits, [*self._words, *words], self._grow)
        return Fit(self._job, request, self._position, survival).run()

    def update_optimizer(self, **numbers: Any) -> None:
        """Change numbers of the optimizer, such as `learning_rate`, from the next exchange on; its state stays.

        Collective, blocking; ValueError or TypeError on every worker, and nothing has changed.
        """
        update_optimizer(self._job, numbers)

    # ---- what was learnt

    def evaluate(self, x: Samples, y: Samples = None, *, batch_size: int = BLOCK) -> dict[str, float]:
        """ "loss" and the metrics by name, means over all samples, equal on every worker.

        x and y are arrays (samples, ...), the same on every worker, of which each computes a share, `batch_size`
        samples at once; or x alone, this worker's own batches (x, y). Sums are in float64, added in rank order: exact
        for uneven shares, but for rounding. In an asynchronous store all workers first take the servers' parameters;
        with `elastic` or `overlap` each measures with its own.

        Collective, blocking; ValueError or TypeError on every worker where arguments are wrong or differ, or a metric
        fails on one.
        """

        def asked() -> Source:
            found = source_of(x, y, None if y is None else batch_size, 0, "evaluate")
            see_samples(self.model, found)
            return found

        source, refusal = attempt(asked)
        self.kv.worker.agree("evaluate", test_words(source), refusal, noun="argument")
        self.exchange.finish()
        return evaluate(self._job, source)

    def predict(self, x: Samples) -> np.ndarray:
        """The model's outputs (samples, ...) for x (samples, ...), by this worker's parameters. Local."""
        see_method(self.model, "predict", "predict")
        self.exchange.finish()
        rows = table("predict: x", x) if hasattr(x, "shape") else x
        if not isinstance(rows, Rows):
            outputs: np.ndarray = self.model.predict(rows)
            return outputs
        starts = range(0, max(len(rows), 1), BLOCK)
        return np.concatenate([self.model.predict(rows[start : start + BLOCK]) for start in starts])

    # ---- checkpoints

    def save(self, path: str | os.PathLike[str], keep: int | None = None) -> str:
        """Write a checkpoint to the folder `path`, between two steps, and keep the newest `keep` (None: all); its path.

        For loops of your own; `fit` saves by `Checkpoint`. Collective, blocking; ValueError or TypeError on every
        worker where it cannot be written, and then older ones are there.
        """
        return checkpoint.save(self._job, path, self._position, keep)

    def resume(self, path: str | os.PathLike[str]) -> int:
        """Go on from the newest checkpoint of a folder, or from one file step-*.trainer.safetensors; its step.

        The next `fit` goes on from there. Collective, blocking; ValueError or TypeError on every worker where there is
        none, or it does not fit.
        """
        found = checkpoint.find(self._job, path)
        assert found is not None  # without begin= there is one
        checkpoint.take(self._job, found)
        self._position, self._resumed = checkpoint.of_worker(found.positions, self.kv.rank), found.positions
        return self._position.step

    # ---- how fast

    def report(self) -> Report:
        """Return what the last steps were on this worker: seconds of an iteration, measured and predicted, the share
        of the communication that compute hid, groups, and the last one's tasks (`save_trace`, `save_picture`). Local.

        RuntimeError before the first step has ended.
        """
        return self.exchange.report()

    def profile(self, x: np.ndarray, y: np.ndarray, save: str | Path | None = None) -> Profile:
        """The profile of this job, measured on its ranks now: layers on a batch, messages through the store.

        Collective over the workers, blocking; gradients are overwritten, parameters stay. Rank 0 writes it to `save`,
        for `mpips plan`. The model is one in layers, as `overlap` needs it; ValueError otherwise, and with `elastic`.
        """
        check_model(self.model, "profile")
        if self._job.blocking is not None and isinstance(self._job.blocking.update, ElasticAveraging):
            raise ValueError("elastic averaging sends its model whole, every few iterations: there is nothing to plan")
        if isinstance(self.exchange, Overlapped):
            found = self.exchange.measure(x, y)
        else:
            found = job_profile(self.model, self.kv, x, y)
        if save is not None and self.kv.rank == 0:
            save_profile(found, save)
        return found


def _update_of(
    model: Model, kv: KVStore, made: Optimizer, elastic: Elastic | None, local: Local | None, clip_norm: float | None
) -> Update:
    """Return what makes the next parameters of a step's gradients."""
    if elastic is not None:
        return ElasticAveraging(model, kv, made, elastic, clip_norm)
    if local is not None:
        return LocalTraining(model, kv, made, local, check_clip(clip_norm))
    if clip_norm is not None and not kv.layout.asynchronous:
        return Summed(model, kv, made, clip_norm)
    return Gradients(model, kv, made, clip_norm)


def _see_local(kv: KVStore, local: Local, elastic: Elastic | None, overlap: str | None) -> None:
    """TypeError or ValueError for what does not go with training apart."""
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
    averaged(local.optimizer, 1)  # it has a rescale


def _see_together(
    kv: KVStore, elastic: Elastic | None, overlap: str | None, clip_norm: float | None, accumulate: int
) -> None:
    """ValueError for what does not go together."""
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
        word = f"clip_norm={clip_norm}" if clip_norm is not None else f"accumulate={accumulate}"
        raise ValueError(
            f"{word} needs all gradients of a step before the first is sent, and overlap={overlap!r} "
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
