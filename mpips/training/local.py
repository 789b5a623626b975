"""Train apart and talk rarely: local SGD, DiLoCo and elastic averaging are one exchange, with other numbers.

A worker makes inner steps by itself. Now and then it pushes something of its parameters w, the store updates its own
centre c by an optimizer, and the worker moves towards the c that it pulls:

    local SGD, DiLoCo   pushes c - w, with the c of its last pull, which the store's outer optimizer takes as a gradient
    elastic averaging   pushes w; the store's optimizer is Elastic1
    then                w = w + (1 - keep) (c - w): with keep 0, as in DiLoCo, the worker goes on from the new centre

Sources: DiLoCo 2311.08105; fragments that are exchanged in turn, during the next inner steps, and mixed: 2501.18512;
elastic averaging: MXNET-MPI, equations 2 and 3. Without servers every worker runs the outer optimizer, alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpips.optimizers.base import Optimizer
from mpips.optimizers.elastic import INTERVAL, Elastic1, Elastic2
from mpips.optimizers.sgd import SGD

if TYPE_CHECKING:
    from mpips.store.api import KVStore
    from mpips.store.runtime.engine import Handle

OUTER = {"nesterov": SGD(0.7, momentum=0.9, nesterov=True), "average": SGD(1.0)}
"""Outer optimizers by name: DiLoCo's, and local SGD's, which takes the mean of all workers' parameters."""
Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Elastic:
    """Elastic averaging: every `interval` iterations client and centre move together by `alpha`."""

    alpha: float = 0.5
    interval: int = INTERVAL

    def __post_init__(self) -> None:
        Elastic1(alpha=self.alpha)
        if self.interval < 1:
            raise ValueError(f"Elastic(interval={self.interval}): give a number of iterations >= 1")


@dataclass(frozen=True)
class Local:
    """Local SGD: every `every` inner steps the store's `outer` optimizer takes what they have changed as a gradient.

    fragments   the parameters in so many parts, exchanged in turn, `every / fragments` steps apart.
    delay       an exchange travels during so many inner steps; 0: workers wait for it.
    keep        the share of its own parameters that a worker keeps when the centre has come.
    """

    every: int = 500
    outer: str | Optimizer = "nesterov"
    fragments: int = 1
    delay: int = 0
    keep: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name}={number!r}: give an int, at least {least}")
        if self.fragments > self.every:
            raise ValueError(f"fragments={self.fragments} of every={self.every} steps: give at most one a step")
        if self.delay >= self.every // self.fragments:
            raise ValueError(f"delay={self.delay}: the next fragment is due after {self.every // self.fragments} steps "
                             "(every / fragments): give fewer")  # fmt: skip
        if not 0 <= self.keep < 1:
            raise ValueError(f"keep={self.keep!r}: give a share of at least 0, below 1")
        if isinstance(self.outer, str) and self.outer not in OUTER:
            raise ValueError(f"outer={self.outer!r} is unknown: give {', '.join(OUTER)}, or an mpips.optimizers record")

    @property
    def optimizer(self) -> Optimizer:
        """Return the outer optimizer, as if there were one worker."""
        return OUTER[self.outer] if isinstance(self.outer, str) else self.outer


class Exchange:
    """Exchange parameters with the store's centre, as `rule` says. `shapes`: arrays like the parameters; `members`: the
    equal workers of a client, whose pushes the client sums."""

    def __init__(self, kv: KVStore, keys: Sequence[str], shapes: Arrays, rule: Elastic | Local, members: int) -> None:
        self._kv, self._keys, self._members = kv, list(keys), members
        self._pushed = [np.empty_like(array) for array in shapes]
        self.centers = [np.empty_like(array) for array in shapes]
        """The centre, as it was pulled last."""
        self._elastic = isinstance(rule, Elastic)
        keep = 1.0 - rule.alpha if isinstance(rule, Elastic) else rule.keep
        self._attract = Elastic2(alpha=rule.alpha if isinstance(rule, Elastic) else 1.0 - keep)
        self._whole = not self._elastic and keep == 0.0

    def begin(
        self, parameters: Arrays, places: Sequence[int], wait: bool = True, share: float = 1.0
    ) -> Handle | None:  # fmt: skip
        """Push what is to be said of the parameters in these places, and ask for the centre; blocking if `wait`.
        `share`: by how much a change counts."""
        for place in places:
            parameter, pushed = parameters[place], self._pushed[place]
            if self._elastic:
                np.divide(parameter, self._members, out=pushed)  # a push sums over members, who are equal
            else:
                np.subtract(self.centers[place], parameter, out=pushed)
                if share != 1.0:
                    np.multiply(pushed, share, out=pushed)
        keys, centers = [self._keys[place] for place in places], [self.centers[place] for place in places]
        said = [self._pushed[place] for place in places]
        if wait:
            self._kv.pushpull(keys, said, out=centers)
            return None
        return self._kv.ipushpull(keys, said, out=centers)

    def take(self, parameters: Arrays, places: Sequence[int]) -> None:
        """Move parameters towards the centre, which has come."""
        for place in places:
            parameter, center = parameters[place], self.centers[place]
            if self._whole:
                parameter[...] = center
            else:
                self._attract.update(parameter.reshape(-1), center.reshape(-1), (), 1)


class LocalRounds:
    """Count a worker's inner steps, and exchange each fragment when it is due. All workers make equally many.

    `tokens`: an int64 key, of one element, in which workers sum how many tokens their changes are of; "": workers count
    alike. For synchronous kinds.
    """

    def __init__(
        self, kv: KVStore, keys: Sequence[str], parameters: Arrays, rule: Local, tokens: str = ""
    ) -> None:  # fmt: skip
        self._rule, self.steps, self._kv, self._key = rule, 0, kv, tokens
        self._exchange = Exchange(kv, keys, parameters, rule, 1)
        self.fragments = cut([array.size for array in parameters], rule.fragments)
        """Places of the parameters of each fragment."""
        self._tokens = [0] * len(self.fragments)
        """Of this worker, since each fragment's last exchange."""
        self._open: tuple[Sequence[int], int, Handle] | None = None
        """What is under way: places, the step at which it is taken, and its handle."""
        self.centers = self._exchange.centers
        kv.pull(list(keys), self.centers)
        self._exchange.take(parameters, range(len(parameters)))

    def step(self, parameters: Arrays, tokens: int = 0) -> None:
        """An inner step of so many tokens has been made: take the centre that is due; begin the exchange that is."""
        self.steps += 1
        self._tokens = [count + tokens for count in self._tokens]
        if self._open is not None and self.steps >= self._open[1]:
            self.finish(parameters)
        for number, places in enumerate(self.fragments):
            if (self.steps - (number + 1) * self._rule.every // len(self.fragments)) % self._rule.every:
                continue
            share = self._share(number) if self._key else 1.0
            handle = self._exchange.begin(parameters, places, wait=not self._rule.delay, share=share)
            if handle is None:
                self._exchange.take(parameters, places)
            else:
                self._open = places, self.steps + self._rule.delay, handle

    def _share(self, number: int) -> float:
        """Return this worker's part of a fragment's tokens, times the workers: the store takes a mean. Blocking."""
        total = np.array([self._tokens[number]])
        self._tokens[number], mine = 0, self._tokens[number]
        self._kv.pushpull(self._key, total)
        return mine * self._kv.num_workers / int(total[0]) if total[0] else 1.0

    def finish(self, parameters: Arrays) -> None:
        """Wait for what is under way, and take it."""
        if self._open is not None:
            places, _, handle = self._open
            self._open = None
            handle.wait()
            self._exchange.take(parameters, places)


def cut(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Cut arrays of these sizes, in their order, into so many runs of about equally many elements; no run is empty.

    ValueError where there are fewer arrays than parts.
    """
    if len(sizes) < parts:
        raise ValueError(f"fragments={parts}: there are {len(sizes)} arrays of parameters: give at most as many")
    total, done, number = sum(sizes), 0, 0
    runs: list[list[int]] = [[] for _ in range(parts)]
    for place, size in enumerate(sizes):
        left = len(sizes) - place
        middle = (done + size / 2) * parts >= (number + 1) * total
        if runs[number] and (middle or left == parts - number - 1) and number + 1 < parts:
            number += 1
        runs[number].append(place)
        done += size
    return runs
