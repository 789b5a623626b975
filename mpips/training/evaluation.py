"""`evaluate`: the loss and the metrics of test data. Every worker computes a share, and the shares are added up.

A metric is a function of the model's outputs (samples, ...) and the targets. It returns a value for each sample,
(samples,) or (samples, ...), or one number, the mean over the samples of the batch. Both forms are turned into a sum
over samples, in float64. The sums and the numbers of samples are added over the workers in rank order, and divided at
the end. So the result is the mean over all samples, however unevenly the samples are shared out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mpips.collectives.agreement import difference
from mpips.collectives.errors import CollectiveError
from mpips.training.batches import Arrays, Source, share_of
from mpips.training.model import Samples, check_method, samples_of
from mpips.training.step import TrainerParts

Metric = Callable[[Any, Any], Any]
Sums = dict[str, float]
SAMPLES = "samples"
LOSS = "loss"


def check_metrics(metrics: object, model: object) -> dict[str, Metric]:
    """Return the metrics as a dict by name.

    Raises TypeError or ValueError unless `metrics` maps names to functions, or if the model lacks `predict`.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics: give functions of (outputs, y) by name, as {{'accuracy': f}}, not a {type(metrics).__name__}"
        )
    for name, metric in metrics.items():
        if not isinstance(name, str) or name in ("", LOSS, SAMPLES):
            raise ValueError(f"metrics: {name!r} is no name for a metric: give a text other than 'loss' and 'samples'")
        if not callable(metric):
            raise TypeError(f"metrics[{name!r}] is a {type(metric).__name__}: give a function of (outputs, y)")
    if metrics:
        check_method(model, "predict", "metrics=")
    return dict(metrics)


def measured(parts: TrainerParts, batches: Iterable[tuple[Any, Any]]) -> Sums:
    """Return the sums of the loss and the metrics over the samples of these batches, by name. Local.

    The entry "samples" is the number of samples.
    """
    sums = dict.fromkeys((SAMPLES, LOSS, *parts.metrics), 0.0)
    scored, classes = _has_accuracy(parts), 0.0
    loss = getattr(parts.model, "loss", None)
    loss = loss if callable(loss) else parts.model.loss_and_gradients
    for x, y in batches:
        if not (samples := samples_of(x, y)):
            continue
        sums[SAMPLES] += samples
        sums[LOSS] += samples * float(loss(x, y))
        if parts.metrics:
            outputs = parts.model.predict(x)
            for name, metric in parts.metrics.items():
                sums[name] += _summed(name, metric(outputs, y), samples)
        elif scored and _are_classes(y):
            classes += samples
            sums["accuracy"] = sums.get("accuracy", 0.0) + samples * float(parts.model.accuracy(x, y))
    if 0 < classes < sums[SAMPLES]:
        others = sums[SAMPLES] - classes
        raise ValueError(
            f"evaluate: y are classes, whole numbers (samples,), for {classes:.0f} samples and not for "
            f"the other {others:.0f}: the accuracy is of all or none; give alike batches"
        )
    return sums


def names_of(parts: TrainerParts, source: Source) -> list[str]:
    """Return the names of the values that are measured besides the loss.

    These are the metrics. Without metrics it is the accuracy, if the model has `accuracy` and y are classes.
    """
    if parts.metrics or not _has_accuracy(parts):
        return list(parts.metrics)
    return ["accuracy"] if not isinstance(source, Arrays) or _are_classes(source.y) else []


def _has_accuracy(parts: TrainerParts) -> bool:
    return callable(getattr(parts.model, "accuracy", None))


def _are_classes(y: Samples) -> bool:
    """True if the targets are classes: one whole number for each sample, (samples,)."""
    if getattr(y, "ndim", 0) != 1:
        return False
    if isinstance(y.dtype, np.dtype):
        return y.dtype.kind in "iu"
    return str(y.dtype).removeprefix("torch.").startswith(("int", "uint"))


def _summed(name: str, value: object, samples: int) -> float:
    """Turn the value that a metric returned for a batch into a sum over the samples."""
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"metrics[{name!r}] gave {value!r}: give a number for each sample, or their mean") from None
    if array.ndim == 0:
        return float(array) * samples
    if len(array) != samples or not array.size:
        raise ValueError(
            f"metrics[{name!r}] gave an array {array.shape} for {samples} samples: give a value for each, or their mean"
        )
    return float(array.reshape(samples, -1).mean(axis=1).sum())


def means(every: Iterable[Sums]) -> Sums:
    """Return the means over all samples. `every` has the sums of each worker.

    Raises ValueError if no worker has samples, or if workers measured different things.
    """
    total: Sums = {}
    filled = {rank: sums for rank, sums in enumerate(every) if sums[SAMPLES]}
    if unlike := difference({rank: [(name, "measured") for name in sorted(sums)] for rank, sums in filled.items()}):
        raise ValueError(
            f"evaluate: {unlike}, where y are no classes, whole numbers (samples,): give all workers alike batches"
        )
    for sums in filled.values():
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value
    samples = total.pop(SAMPLES, 0.0)
    if not samples:
        raise ValueError("evaluate: no worker has a sample")
    return {name: value / samples for name, value in total.items()}


def evaluate(parts: TrainerParts, source: Source, number: int = 1) -> Sums:
    """Return the means over the samples of all workers.

    Collective, blocking. If one worker has an error, all workers raise it.
    """
    kv = parts.kv
    if parts.blocking is not None:
        parts.blocking.update.share()
    sums: Sums = {}
    failure: Exception | None = None
    try:
        sums = measured(parts, share_of(source, number, kv.rank, kv.num_workers))
    except CollectiveError:
        # The store has failed, so the other workers raise an error themselves, and we cannot send them ours.
        raise
    except Exception as error:
        # The user's model, metric or batches may raise anything.
        failure = error
    # All workers raise the same error. A ValueError or TypeError is raised as it is. Any other failure becomes a
    # ValueError that names its class.
    refusal = failure
    if failure is not None and not isinstance(failure, (ValueError, TypeError)):
        refusal = ValueError(f"evaluate: {type(failure).__name__}: {failure}")
    try:
        encoded = kv.worker.agree("evaluate", refusal=refusal, data=json.dumps(sums).encode())
    except (ValueError, TypeError) as error:
        if failure is None:
            raise
        raise error from failure
    return means(json.loads(data) for data in encoded)


def evaluate_here(parts: TrainerParts, source: Source, number: int = 1) -> Sums:
    """Return the means over all samples, computed by this worker alone with its current parameters. Local."""
    return means([measured(parts, share_of(source, number, 0, 1))])


def compared_test(source: Source | None) -> list[tuple[str, str]]:
    """Return the properties of the test data that must be equal on all workers, as (name, text) pairs."""
    if source is None:
        return [("test", "None")]
    return [("test", str(source.x.shape) if isinstance(source, Arrays) else "batches")]
