"""Exchanges of workers that train independently: local SGD, DiLoCo and elastic averaging.

A worker makes inner steps by itself. Now and then it makes an exchange: it pushes a value that depends on its
parameters w, the store's optimizer updates the centre c (the store's own copy of the parameters), and the worker pulls
c and moves towards it:

    local SGD, DiLoCo   push c - w, with c from the last pull; the store's outer optimizer treats it as a gradient
    elastic averaging   push w; the store's optimizer is Elastic1
    then in both        w = w + (1 - keep) (c - w): with keep 0, as in DiLoCo, the worker continues from the new centre

The model may be divided into fragments, which are exchanged at different steps. Without servers every worker runs the
outer optimizer, with equal results.

Sources: DiLoCo is arXiv 2311.08105. Fragments, exchanges during the next inner steps, and mixing (`keep`) are from
arXiv 2501.18512. Elastic averaging is from MXNET-MPI, equations 2 and 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from mpips.collectives import log
from mpips.collectives.errors import of_caller
from mpips.collectives.kernels.quiet import quiet
from mpips.collectives.recorder import own as recorder
from mpips.optimizers.base import Optimizer
from mpips.optimizers.elastic import INTERVAL, Elastic1, Elastic2
from mpips.optimizers.sgd import SGD
from mpips.store.runtime.errors import LostError

if TYPE_CHECKING:
    from mpips.store.api import KVStore
    from mpips.store.runtime.engine import Handle

LOG = log.get("mpips.training")
# Outer optimizers by name. DiLoCo uses "nesterov". Local SGD uses "average", which gives the mean of all workers'
# parameters.
OUTER = {"nesterov": SGD(0.7, momentum=0.9, nesterov=True), "average": SGD(1.0)}
# the key in which workers of a synchronous store sum their numbers of tokens
TOKENS = "mpips/tokens"
Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Elastic:
    """Elastic averaging: every `interval` iterations a client and the store's centre move towards each other.

        trainer = mpips.Trainer(model, kv, "sgd", learning_rate=0.1, elastic=mpips.Elastic(alpha=0.5, interval=64))

    A client is a group of workers with equal parameters. The centre is the store's own copy of the parameters.

    Args:
        alpha: Each side moves by this share of the difference.
        interval: The number of iterations between two exchanges.
    """

    alpha: float = 0.5
    interval: int = INTERVAL

    def __post_init__(self) -> None:
        Elastic1(alpha=self.alpha)
        if self.interval < 1:
            raise ValueError(f"Elastic(interval={self.interval}): give a number of iterations >= 1")


@dataclass(frozen=True)
class Local:
    """Local SGD and DiLoCo: workers make inner steps alone, and an outer optimizer treats their changes as a gradient.

        trainer = mpips.Trainer(model, kv, "adam", learning_rate=1e-3, local=Local(every=500))

    Args:
        every: The number of inner steps between two exchanges of the same parameters.
        outer: The outer optimizer, which the store runs: "nesterov" (for DiLoCo), "average" (the mean, for local SGD),
            or an Optimizer that has the field `rescale`.
        fragments: The number of parts into which the parameters are divided. The parts are exchanged in turn,
            `every / fragments` steps apart.
        delay: The number of inner steps that a worker makes while an exchange is in flight. With 0 it waits for the
            exchange.
        keep: The weight of a worker's own parameters when it mixes in the centre, from 0 up to but not including 1.

    Raises:
        ValueError, TypeError: An argument is invalid, or two arguments do not fit together.

    >>> mpips.training.Local(every=500, outer="average").optimizer
    SGD(learning_rate=1.0, weight_decay=0.0, rescale=1.0, momentum=0.0, nesterov=False)
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
                raise of_caller(ValueError(f"{name}={number!r}: give an int, at least {least}"))
        if self.fragments > self.every:
            raise of_caller(
                ValueError(f"fragments={self.fragments} of every={self.every} steps: give at most one a step")
            )
        if self.delay >= self.every // self.fragments:
            due = self.every // self.fragments
            raise of_caller(
                ValueError(
                    f"delay={self.delay}: the next fragment is due after {due} steps (every / fragments): give fewer"
                )
            )
        if not 0 <= self.keep < 1:
            raise of_caller(ValueError(f"keep={self.keep!r}: give a share of at least 0, below 1"))
        known = f"give {', '.join(OUTER)}, or an mpips.optimizers record, as mpips.optimizers.SGD(0.7)"
        if isinstance(self.outer, str) and self.outer not in OUTER:
            raise of_caller(ValueError(f"outer={self.outer!r} is unknown: {known}"))
        if not isinstance(self.outer, str) and not hasattr(self.outer, "rescale"):
            raise of_caller(TypeError(f"outer is a {type(self.outer).__name__}, no optimizer of gradients: {known}"))

    @property
    def optimizer(self) -> Optimizer:
        """The outer optimizer. Its `rescale` is that for a single worker."""
        return OUTER[self.outer] if isinstance(self.outer, str) else self.outer


def averaged(optimizer: Optimizer, workers: float) -> Optimizer:
    """Return the optimizer for gradients that arrive as a sum over workers. Its `rescale` turns the sum into the mean.

    Raises ValueError if the optimizer has no field `rescale`.
    """
    if "rescale" not in {field.name for field in fields(optimizer)}:
        raise ValueError(f"{optimizer!r} has no rescale: a Trainer needs an optimizer of gradients")
    return replace(optimizer, rescale=optimizer.rescale / workers)  # type: ignore[call-arg, attr-defined]


def workers_in_a_sum(kv: KVStore) -> float:
    """Return the number of workers whose gradients make one update.

    In a synchronous store these are all workers, and in an asynchronous store the workers of one client. If clients
    differ in size, the result is their mean size. A store has only one optimizer, so larger clients then take larger
    steps.
    """
    return kv.num_workers / len(kv.layout.clients) if kv.layout.asynchronous else kv.num_workers


class CenterExchange:
    """Exchanges parameters with the store's centre. An exchange consists of the calls prepare(), send() and take().

    In all methods, `places` are positions in the list of all parameters.

    Args:
        kv: The store.
        keys: The keys of the parameters in the store.
        shapes: Arrays with the shapes and dtypes of the parameters.
        rule: The rule that decides which values are pushed, and how far parameters move towards the centre.
        members: The number of workers in a client. Their parameters are equal, and their pushes are summed before they
            reach the store.
    """

    def __init__(self, kv: KVStore, keys: Sequence[str], shapes: Arrays, rule: Elastic | Local, members: int) -> None:
        self._kv = kv
        self._keys = list(keys)
        self._members = members
        # for each parameter, the array that is pushed next
        self._pushed = [np.empty_like(array) for array in shapes]
        # the centre as of the last pull
        self.centers = [np.empty_like(array) for array in shapes]
        self._elastic = isinstance(rule, Elastic)
        keep = 1.0 - rule.alpha if isinstance(rule, Elastic) else rule.keep
        self._attract = Elastic2(alpha=rule.alpha if isinstance(rule, Elastic) else 1.0 - keep)
        # True if a worker copies the centre and keeps nothing of its own parameters
        self._copies = not self._elastic and keep == 0.0

    def _bytes_of(self, place: int) -> int:
        """Return how many bytes an exchange of a parameter sends and receives. Pushes to servers may be compressed."""
        worker, nbytes = self._kv.worker, self.centers[place].nbytes
        key, compressor = worker.keys[self._keys[place]], worker.compressor
        if compressor is not None and self._kv.layout.num_servers and key.floats:
            return nbytes + compressor.max_bytes(key.size)
        return 2 * nbytes

    @quiet
    def prepare(self, parameters: Arrays, places: Sequence[int]) -> None:
        """Compute the values that `send` will push for these parameters."""
        for place in places:
            parameter, pushed = parameters[place], self._pushed[place]
            if self._elastic:
                # All workers of a client push the same value, and the store gets the sum.
                np.divide(parameter, self._members, out=pushed)
            else:
                np.subtract(self.centers[place], parameter, out=pushed)

    @quiet
    def weigh(self, places: Sequence[int], factor: float) -> None:
        """Multiply the values to push by a factor. With a factor of 0 all become 0, even NaN."""
        for place in places if factor != 1.0 else ():
            if factor:
                np.multiply(self._pushed[place], factor, out=self._pushed[place])
            else:
                self._pushed[place][...] = 0

    def send(self, places: Sequence[int], wait: bool = True) -> Handle | None:
        """Push the prepared values, and pull the centre. Block if `wait` is True, and otherwise return a handle."""
        keys, centers = [self._keys[place] for place in places], [self.centers[place] for place in places]
        pushed = [self._pushed[place] for place in places]
        if wait:
            self._kv.pushpull(keys, pushed, out=centers)
            return None
        return self._kv.ipushpull(keys, pushed, out=centers)

    def pull(self, places: Sequence[int]) -> None:
        """Pull the centre without a push. Blocking."""
        self._kv.pull([self._keys[place] for place in places], [self.centers[place] for place in places])

    def clear(self) -> None:
        """Set the values to push to 0."""
        for pushed in self._pushed:
            pushed[...] = 0

    def take(self, parameters: Arrays, places: Sequence[int]) -> None:
        """Move parameters towards the centre that the last pull has brought."""
        for place in places:
            parameter, center = parameters[place], self.centers[place]
            if self._copies:
                parameter[...] = center
            else:
                self._attract.update(parameter.reshape(-1), center.reshape(-1), (), 1)
        recorder.count_exchange(sum(map(self._bytes_of, places)))


class InFlight(NamedTuple):
    """An exchange in flight."""

    # number of the fragment that is exchanged
    number: int
    # the step at which the parameters move towards the centre
    due: int
    # None before the push, when the centre has arrived, or if a failure has interrupted the exchange
    handle: Handle | None = None
    # True once the centre has arrived
    arrived: bool = False


class LocalRounds:
    """Counts a worker's inner steps, and exchanges each fragment of the parameters when it is due.

    All workers of a synchronous store exchange at the same steps. With a quorum, each push carries the number of tokens
    (or inner steps) that it stands for, and the servers weight the push by this number (`server.quorum`).

    Args:
        kv: The store.
        keys: The keys of the parameters in the store.
        parameters: The parameters, which take the values of the centre, unless this worker joins.
        rule: The arguments of `Local`.
        by_tokens: Weight a worker's changes by its tokens. In a synchronous store the workers sum their tokens in the
            key `TOKENS`, which has one int64 element.
        joins: True if this worker has replaced a dead worker. It has nothing to contribute before `rejoin`.
    """

    def __init__(
        self,
        kv: KVStore,
        keys: Sequence[str],
        parameters: Arrays,
        rule: Local,
        by_tokens: bool = False,
        joins: bool = False,
    ) -> None:
        self._rule = rule
        self._kv = kv
        self._by_tokens = by_tokens
        self._keys = list(keys)
        self._joins = joins
        self._quorum = kv.layout.asynchronous and kv.layout.options.quorum >= 0
        self._exchange = CenterExchange(kv, keys, parameters, rule, 1)
        # for each fragment, the indices of its parameters
        self.fragments = cut_into_fragments([array.size for array in parameters], rule.fragments)
        # for each key, the round (number of completed pushes) that includes this worker's last push
        self._goals = [0] * len(keys)
        # for each fragment, this worker's weight in the last exchange: its number of tokens or of inner steps
        self._weights = [0] * len(self.fragments)
        # for each fragment, the factor that `_weigh` has applied to its last push
        self._factors = [1.0] * len(self.fragments)
        self.in_flight: InFlight | None = None
        self.centers = self._exchange.centers
        self.begin_at(0)
        if not joins:
            self.average_over_workers()
            self._exchange.pull(range(len(keys)))
            self.share(parameters)

    def average_over_workers(self) -> None:
        """Set the outer optimizer's `rescale` to the current number of workers. Collective, blocking.

        After a load from a checkpoint, or after a death, `rescale` may fit another number of workers.
        """
        outer = averaged(self._rule.optimizer, workers_in_a_sum(self._kv))
        now = self._kv.worker.groups.of(self._keys[0])
        if now.rescale != outer.rescale:  # type: ignore[union-attr, attr-defined]
            self._kv.update_optimizer(self._keys, rescale=outer.rescale)  # type: ignore[attr-defined]

    def begin_at(self, steps: int, since: Sequence[int] = (), in_flight: InFlight | None = None) -> None:
        """Continue as if `steps` inner steps had been made.

        Args:
            steps: The number of inner steps.
            since: For each fragment, the number of tokens (or inner steps) since its last exchange. The default is the
                number of inner steps.
            in_flight: An exchange whose centre has arrived, and which ends at a later step.
        """
        self.steps, self.in_flight = steps, in_flight
        # for each fragment, the step at which its last exchange began
        self._begun = [max(steps - self._after(number, steps), 0) for number in range(len(self.fragments))]
        # for each fragment, the number of tokens (or inner steps) since its last exchange began
        self.since = list(since) or [steps - begun for begun in self._begun]

    def _after(self, number: int, steps: int) -> int:
        """Return how many steps ago the exchange of fragment `number` was due, counted from step `steps`."""
        return (steps - (number + 1) * self._rule.every // len(self.fragments)) % self._rule.every

    def step(self, parameters: Arrays, tokens: int = 0) -> None:
        """Count an inner step, end an exchange that is due to end, and begin the exchanges that are due.

        `tokens` is the number of tokens that the step trained on.
        """
        self.steps += 1
        self.since = [count + (tokens if self._by_tokens else 1) for count in self.since]
        if self.in_flight is not None and self.in_flight.handle is None and not self.in_flight.arrived:
            # A failure has interrupted the exchange, and no recovery has repeated it.
            self.in_flight = None
        elif self.in_flight is not None and self.steps >= self.in_flight.due:
            self.finish(parameters)
        for number, places in enumerate(self.fragments):
            if self._after(number, self.steps):
                continue
            self._prepare(number, parameters)
            if self._by_tokens and not self._quorum:
                self._weigh(number, self._sum_of_tokens(number))
            handle = self._send(number, places, wait=not self._rule.delay)
            if handle is None:
                self.finish(parameters)
            else:
                self.in_flight = InFlight(number, self.steps + self._rule.delay, handle)
        if (saving := self._kv.worker.saving) is not None:
            # A checkpoint that is being written in the background usually advances with each push. Pushes are rare
            # here, so each step advances it.
            saving.go_on()

    def _prepare(self, number: int, parameters: Arrays) -> None:
        """Begin a fragment's exchange. From now on the exchange must be made, even after a recovery."""
        places = self.fragments[number]
        self._exchange.prepare(parameters, places)
        for place in places:
            self._goals[place] = self._round(place) + 1
        self._begun[number], self._factors[number] = self.steps, 1.0
        self._weights[number], self.since[number] = self.since[number], 0
        self.in_flight = InFlight(number, self.steps + self._rule.delay)

    def _send(self, number: int, places: Sequence[int], wait: bool = True) -> Handle | None:
        """Push the prepared values of some parameters of a fragment, and pull the centre. Blocking if `wait`."""
        for place in places if self._quorum else ():
            self._kv.worker.keys[self._keys[place]].quorum_weight = self._weights[number]
        return self._exchange.send(places, wait)

    def _sum_of_tokens(self, number: int) -> int:
        """Return the number of tokens of all workers since a fragment's last exchange. Collective, blocking."""
        total = np.array([self._weights[number]])
        self._kv.pushpull(TOKENS, total)
        return int(total[0])

    def _weigh(self, number: int, total: int) -> None:
        """Multiply this worker's changes of a fragment by its share of the total weight, times the number of workers.

        The store takes a plain mean over the workers. With this factor the result is a mean weighted by tokens or
        steps. If the changes already have an earlier factor, it is divided out.
        """
        share = self._weights[number] * self._kv.num_workers / total if total else 1.0
        before, self._factors[number] = self._factors[number], share
        self._exchange.weigh(self.fragments[number], share / before if share and before else 0.0)

    def wait(self) -> None:
        """Wait until the centre of an exchange in flight has arrived. Parameters move towards it later, when due."""
        if self.in_flight is not None and (handle := self.in_flight.handle) is not None:
            self.in_flight = self.in_flight._replace(handle=None)
            handle.wait()
            self.in_flight = self.in_flight._replace(arrived=True)

    def finish(self, parameters: Arrays) -> None:
        """Wait for an exchange in flight, and move the parameters towards its centre now."""
        self.wait()
        if self.in_flight is not None:
            self._exchange.take(parameters, self.fragments[self.in_flight.number])
            self.in_flight = None

    def share(self, parameters: Arrays, newest: bool = False) -> None:
        """Set the parameters to the centre, which in a synchronous store is the same on all workers.

        Changes since the last exchange, and their tokens, are discarded.

        Args:
            parameters: The parameters.
            newest: True to pull the centre first. By default the parameters get the centre that this worker pulled
                last.
        """
        self.finish(parameters)
        self.since = [0] * len(self.since)
        if newest:
            self._exchange.pull(range(len(self._keys)))
        for parameter, center in zip(parameters, self.centers):
            parameter[...] = center

    # ---- after a death

    def rejoin(self, parameters: Arrays) -> None:
        """Continue after `kv.recover()`, and make the exchanges that were in flight.

        Collective over all workers, blocking. In a synchronous store:

        1. All workers continue from the step of the worker that is furthest ahead. This worker is in an exchange of a
           fragment.
        2. The other workers also make this exchange. The weight of a worker is its number of inner steps (or tokens)
           since its last exchange of the fragment, and 0 if the worker has just joined.
        3. An exchange that the recovery has undone is made again, with the same changes.

        In an asynchronous store each worker continues from its own step. A worker that joins continues from the step of
        the slowest worker.
        """
        kv, synchronous = self._kv, not self._kv.layout.asynchronous
        own = LocalProgress(self.steps, self._goals, self._begun, self._weights, self.since, self._joins)
        encoded = kv.worker.agree("local training: all meet anew", data=msgspec.msgpack.encode(own))
        every = [msgspec.msgpack.decode(data, type=LocalProgress) for data in encoded]
        others = [progress for progress in every if not progress.joins]
        if not others:
            raise LostError("local training: no worker is left that knows its step: go on from a checkpoint")
        if synchronous:
            self.average_over_workers()
        due = [] if self.in_flight is None else [self.in_flight.number]
        numbers = range(len(self.fragments)) if synchronous or self._joins else due
        if numbers:
            self._exchange.pull([place for number in numbers for place in self.fragments[number]])
        # If the store has completed this exchange, only its result (the centre) still has to be applied on this worker.
        if due and not self._unmade(due[0]):
            self._exchange.take(parameters, self.fragments[due.pop()])
        if self._quorum and (lost := max(goal - self._round(place) for place, goal in enumerate(self._goals)) - 1) > 0:
            LOG.warning("local training: %d of this worker's exchanges that came late are lost with their server", lost)
        ahead = (max if synchronous else min)(others, key=lambda progress: progress.steps)
        if self._joins or (synchronous and self.steps < ahead.steps):
            due += self._catch_up(parameters, ahead, synchronous)
        for number in sorted(range(len(self.fragments)), key=self._begun.__getitem__):
            if again := self._unmade(number):
                if synchronous:
                    self._weigh(number, sum(progress.weight_in(number, ahead) for progress in every))
                self._send(number, again)
        for number in due:
            self._exchange.take(parameters, self.fragments[number])
        self.in_flight = None
        if self._joins:
            self._joins = False
            self.share(parameters)

    def _catch_up(self, parameters: Arrays, ahead: LocalProgress, synchronous: bool) -> list[int]:
        """Jump to the step of the worker `ahead`. Return the fragments whose exchange began in the skipped steps."""
        LOG.warning(
            "local training: this worker goes on at step %d%s",
            ahead.steps,
            ", from the outer parameters" if self._joins else f", and leaves out {ahead.steps - self.steps}",
        )
        before, self.steps = self._begun, ahead.steps
        begins = [] if self._joins else [n for n, begun in enumerate(before) if begun < ahead.begun[n]]
        for number in begins:
            self._prepare(number, parameters)
        self._begun = list(ahead.begun)
        self._goals = list(ahead.goals) if synchronous else [self._round(place) for place in range(len(self._keys))]
        if self._joins:
            self._exchange.clear()
            self._weights, self.since = [0] * len(self.fragments), [0] * len(self.fragments)
            self._factors = [1.0] * len(self.fragments)
        return begins

    def _unmade(self, number: int) -> list[int]:
        """Return the places of those parameters of a fragment whose keys do not include this worker's last push yet."""
        return [place for place in self.fragments[number] if self._goals[place] > self._round(place)]

    def _round(self, place: int) -> int:
        return self._kv.worker.keys[self._keys[place]].round


class LocalProgress(msgspec.Struct, array_like=True, frozen=True):
    """A worker's report of its progress after a death. `LocalRounds` has attributes of the same names."""

    steps: int
    goals: list[int]
    begun: list[int]
    weights: list[int]
    since: list[int]
    joins: bool

    def weight_in(self, number: int, ahead: LocalProgress) -> int:
        """Return this worker's weight (tokens or steps) in the exchange of a fragment that worker `ahead` has begun."""
        if self.joins:
            return 0
        return self.weights[number] if self.begun[number] == ahead.begun[number] else self.since[number]


def cut_into_fragments(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Cut a list of arrays into `parts` runs of consecutive arrays, with about equally many elements. No run is empty.

    Return the positions of the arrays in each run.

    Args:
        sizes: The number of elements of each array.

    Raises:
        ValueError: There are fewer arrays than parts.
    """
    if len(sizes) < parts:
        raise of_caller(
            ValueError(f"fragments={parts}: there are {len(sizes)} arrays of parameters: give at most as many")
        )
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
