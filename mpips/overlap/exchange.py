"""Training with the exchange beside the compute: groups of layers are pushed when their gradients are there, and the
next forward pass takes up a layer when its parameters have come back.

The gradients of a group are one interval of the model's flat array, so nothing is packed. Each group is one key of the
store, pushed and pulled in one. Which layers make a group is a strategy's plan: `auto` measures the job on its first
batch and takes the optimum. All strategies give the numbers of no overlap, since an iteration still uses the parameters
that all gradients of the last one made; bit for bit, where the store sums in an order that does not depend on a key's
size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import measure
from .profile import Linear, Profile, create
from .stage import Groups, from_ends, stage
from .strategies import PARTITIONS

if TYPE_CHECKING:
    from mpips.optimizers import Optimizer
    from mpips.store import KVStore

    from .measure import LayeredModel

FIXED = ("sequential", "single", "layerwise")  # they need no profile
STRATEGIES = ("auto", *PARTITIONS)


class Overlapped:
    """An exchange for `mpips.Trainer`. Plans and makes its keys in the first step, which all workers take together.

    strategy: "auto" or the name of one in `mpips plan`. While it measures, "auto", "merged", "ibatch" and "optimal"
    keep up to 1.4 times the model more on the servers. ValueError for another name or a model without layers.
    """

    def __init__(self, model: LayeredModel, kv: KVStore, optimizer: Optimizer, strategy: str = "auto") -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"overlap={strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
        if not hasattr(model, "layer_elements"):
            raise ValueError(f"overlap={strategy!r} needs a model in layers (mpips.overlap.measure.LayeredModel)")
        self._model, self._kv, self._optimizer, self.strategy = model, kv, optimizer, strategy
        self._offsets = np.concatenate(([0], np.cumsum(model.layer_elements)))
        self._under_way: dict[tuple[int, int], Any] = {}
        self._group_of: dict[int, tuple[int, int]] = {}
        self.groups: Groups = ()
        """The plan, once there was a step."""
        self.profile: Profile | None = None
        """What was measured, if anything was."""

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """One iteration; the batch's loss. The new parameters are there after `finish`; the next step waits itself."""
        if not self.groups:
            self._prepare(x, y)
        return self._model.loss_and_gradients(x, y, self._before, self._ready)

    def finish(self) -> None:
        """Wait until the parameters are those of the last step. Blocking."""
        under_way, self._under_way = self._under_way, {}
        for handle in under_way.values():
            handle.wait()

    def _before(self, layer: int) -> None:
        handle = self._under_way.pop(self._group_of[layer + 1], None)
        if handle is not None:
            handle.wait()

    def _ready(self, layer: int) -> None:
        first, last = self._group_of[layer + 1]
        if layer + 1 == first:
            where = self._interval(first, last)
            self._under_way[first, last] = self._kv.ipushpull(
                self._key(first, last), self._model.flat_gradients[where], out=self._model.flat_parameters[where],
                priority=-first,
            )  # fmt: skip

    def _prepare(self, x: np.ndarray, y: np.ndarray) -> None:
        if self.strategy not in FIXED:
            self.profile = self._measure(x, y)
        self.groups = self._plan()
        self._group_of = {layer: group for group in self.groups for layer in range(group[0], group[1] + 1)}
        keys = [self._key(*group) for group in self.groups]
        values = [self._model.flat_parameters[self._interval(*group)] for group in self.groups]
        self._kv.init(keys, values)
        self._kv.set_optimizer(self._optimizer)
        self._kv.pull(keys, values)

    def _plan(self) -> Groups:
        """Rank 0's groups, on every worker."""
        layers = len(self._model.layer_elements)
        problem = self.profile.push() if self.profile else stage([0.0] * layers, 0.0, [0.0] * layers)
        groups = PARTITIONS["optimal" if self.strategy == "auto" else self.strategy](problem)
        ends = np.zeros(layers, np.int64)
        ends[: len(groups)] = [last for _, last in groups]
        self._workers.Bcast(ends)
        return from_ends(int(end) for end in ends if end)

    def _measure(self, x: np.ndarray, y: np.ndarray) -> Profile:
        elements = list(self._model.layer_elements)
        forward, backward = measure.compute(self._model, x, y)
        scratch = np.zeros_like(self._model.flat_gradients), np.zeros_like(self._model.flat_gradients)
        sampled = measure.sample_groups(elements)
        self._kv.init([self._key(*group, "measure") for group in sampled],
                      [scratch[0][self._interval(*group)] for group in sampled])

        def message(first: int, last: int) -> Any:
            where = self._interval(first, last)
            return self._kv.ipushpull(self._key(first, last, "measure"), scratch[0][where], out=scratch[1][where])

        startup, per_byte = measure.network(elements, message, self._slowest)
        names = [f"layer{number}" for number in range(len(elements))]
        network = Linear(startup, per_byte, self._kv.num_workers)
        return create(names, elements, forward, backward, network, startup, 1 / max(per_byte, 1e-15))

    @property
    def _workers(self) -> Any:
        return self._kv.layout.workers

    def _slowest(self, seconds: float) -> float:
        everybody = np.empty(self._kv.num_workers)
        self._workers.Allgather(np.array([seconds]), everybody)
        return float(everybody.max())

    def _interval(self, first: int, last: int) -> slice:
        return slice(int(self._offsets[first - 1]), int(self._offsets[last]))

    def _key(self, first: int, last: int, what: str = "layers") -> str:
        return f"overlap {what} {first}-{last}"
