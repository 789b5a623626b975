"""The profile of a job, measured on its own ranks: what messages cost, and how long the layers compute.

Everything that needs MPI comes from the caller: `message(first, last)` starts the exchange of layers and returns a
handle, `slowest(seconds)` is the largest value of all workers, and brings them together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from . import fit
from .execute import Send
from .profile import PARAMETER_BYTES

Group = tuple[int, int]
IN_A_ROW = 8  # messages of single layers, as they come where their number matters
SHARES = (0.1, 0.3, 1.0)


class LayeredModel(Protocol):
    """A model whose layers lie one after the other in flat arrays, and which tells when it comes to each."""

    flat_parameters: np.ndarray
    flat_gradients: np.ndarray
    layer_elements: Sequence[int]

    def loss_and_gradients(
        self,
        x: np.ndarray,
        y: np.ndarray,
        before: Callable[[int], Any] | None = None,
        ready: Callable[[int], Any] | None = None,
    ) -> float:
        """Forward and backward. `before(layer)`, from 0: its parameters come next. `ready(layer)`: its gradients are
        there
        and its parameters may be overwritten."""
        ...


def sample_groups(elements: Sequence[int]) -> tuple[Group, ...]:
    """What `network` sends: the smallest, the median and the largest layer; the first tenth, 3 tenths, all layers."""
    by_size = 1 + np.argsort(elements, kind="stable")
    single = [(int(layer), int(layer)) for layer in by_size[[0, len(elements) // 2, -1]]]
    several = [(1, max(1, round(len(elements) * share))) for share in SHARES]
    return tuple(dict.fromkeys(single + several))


def network(
    elements: Sequence[int], message: Send, slowest: Callable[[float], float], repeats: int = 5
) -> tuple[float, float]:
    """(startup seconds, seconds a byte) of messages of `sample_groups`, under way while the training thread sleeps.

    Medians over `repeats` of the slowest worker's time. Collective, blocking.
    """
    groups = sample_groups(elements)
    offsets = np.concatenate(([0], np.cumsum(elements)))
    times: dict[Group, list[float]] = {group: [] for group in groups}
    for repeat in range(repeats + 1):
        for group in groups:
            slowest(0.0)
            handles = [message(*group) for _ in range(IN_A_ROW if group[0] == group[1] else 1)]
            while not handles[-1].done:
                time.sleep(5e-4)
            for handle in handles:
                handle.wait()
            seconds = slowest((handles[-1].ended - handles[0].started) / len(handles))
            if repeat:  # the first one warms up
                times[group].append(seconds)
    nbytes = [PARAMETER_BYTES * float(offsets[last] - offsets[first - 1]) for first, last in groups]
    medians = [float(np.median(times[group])) for group in groups]
    if len(set(nbytes)) == 1:
        return medians[0], 0.0  # one layer: nothing to divide
    return fit.line(nbytes, medians)


def compute(model: LayeredModel, x: np.ndarray, y: np.ndarray, repeats: int = 3) -> tuple[list[float], list[float]]:
    """(forward, backward) seconds of every layer on a batch, medians; the loss counts to the last layer's.

    Only gradients are written. The turn at the last layer is not seen from outside: a third of it counts as forward.
    """
    layers = len(model.layer_elements)
    forward, backward = np.empty((repeats, layers)), np.empty((repeats, layers))
    for repeat in range(repeats):
        begin, end = np.empty(layers), np.empty(layers)

        def before(layer: int, begin: np.ndarray = begin) -> None:
            begin[layer] = time.perf_counter()

        def ready(layer: int, end: np.ndarray = end) -> None:
            end[layer] = time.perf_counter()

        model.loss_and_gradients(x, y, before, ready)
        turn = end[-1] - begin[-1]
        forward[repeat] = np.append(np.diff(begin), turn / 3)
        backward[repeat] = np.append(end[:-1] - end[1:], turn * 2 / 3)
    return np.median(forward, axis=0).tolist(), np.median(backward, axis=0).tolist()
