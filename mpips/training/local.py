"""What workers that train apart exchange, and when: local SGD, DiLoCo and elastic averaging.

A worker makes inner steps by itself. Now and then it pushes a value that depends on its parameters w, the store updates
its own centre c by an optimizer, and the worker pulls c and moves towards it:

    local SGD, DiLoCo   push c - w, with the c of the last pull; the store's outer optimizer takes it as a gradient
    elastic averaging   push w; the store's optimizer is Elastic1
    then in both        w = w + (1 - keep) (c - w): with keep 0, as in DiLoCo, the worker continues from the new centre

Sources: DiLoCo 2311.08105. Fragments that are exchanged in turn, during the next inner steps, and mixed: 2501.18512.
Elastic averaging: MXNET-MPI, equations 2 and 3. Without servers every worker runs the outer optimizer, all alike.
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
# outer optimizers by name: DiLoCo's, and local SGD's, which takes the mean of all workers' parameters
OUTER = {"nesterov": SGD(0.7, momentum=0.9, nesterov=True), "average": SGD(1.0)}
# the key in which workers of a synchronous store sum their tokens
TOKENS = "mpips/tokens"
Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Elastic:
    """Elastic averaging: every `interval` iterations a client and the store's centre move towards each other.

        trainer = mpips.Trainer(model, kv, "sgd", learning_rate=0.1, elastic=mpips.Elastic(alpha=0.5, interval=64))

    Args:
        alpha: The share of their difference by which each moves.
        interval: Iterations between two exchanges.
    """

    alpha: float = 0.5
    interval: int = INTERVAL

    def __post_init__(self) -> None:
        Elastic1(alpha=self.alpha)
        if self.interval < 1:
            raise ValueError(f"Elastic(interval={self.interval}): give a number of iterations >= 1")


@dataclass(frozen=True)
class Local:
    """Local SGD and DiLoCo: workers make inner steps alone, and an outer optimizer takes their changes as a gradient.

        trainer = mpips.Trainer(model, kv, "adam", learning_rate=1e-3, local=Local(every=500))

    Args:
        every: Inner steps between two exchanges of the same parameters.
        outer: The outer optimizer, which the store runs: "nesterov" (DiLoCo's), "average" (local SGD's mean), or an
            Optimizer with a rescale.
        fragments: The number of parts into which the parameters are divided. The parts are exchanged in turn,
            `every / fragments` steps apart.
        delay: Inner steps that a worker makes while an exchange is in flight. With 0 it waits for the exchange.
        keep: The weight of a worker's own parameters when it mixes in the centre, from 0 to 1.

    Raises:
        ValueError, TypeError: An argument is wrong, or they do not fit together.

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
        """The outer optimizer, with the rescale for a single worker."""
        return OUTER[self.outer] if isinstance(self.outer, str) else self.outer


def averaged(optimizer: Optimizer, workers: float) -> Optimizer:
    """Return the optimizer for gradients that arrive as a sum over workers: its `rescale` is divided by their number.

    Raises ValueError if the optimizer has no rescale.
    """
    if "rescale" not in {field.name for field in fields(optimizer)}:
        raise ValueError(f"{optimizer!r} has no rescale: a Trainer needs an optimizer of gradients")
    return replace(optimizer, rescale=optimizer.rescale / workers)  # type: ignore[call-arg, attr-defined]


def workers_in_a_sum(kv: KVStore) -> float:
    """Return the number of workers whose gradients make one update: all of a synchronous store, or those of a client.

    If clients differ in size it is their mean size. A store has one optimizer, so larger clients take larger steps.
    """
    return kv.num_workers / len(kv.layout.clients) if kv.layout.asynchronous else kv.num_workers


class CenterExchange:
    """Exchanges parameters with the store's centre. An exchange is prepare(), send() and take().

    Arguments `places` are positions in the list of all parameters.

    Args:
        keys: The keys of the parameters in the store.
        shapes: Arrays like the parameters.
        rule: Says what is pushed, and by how much parameters move to the centre.
        members: The number of workers in a client. Their parameters are equal, and their pushes are summed before they
            reach the store.
    """

    def __init__(self, kv: KVStore, keys: Sequence[str], shapes: Arrays, rule: Elastic | Local, members: int) -> None:
        self._kv = kv
        self._keys = list(keys)
        self._members = members
        # what is pushed next, an array for each parameter
        self._pushed = [np.empty_like(array) for array in shapes]
        # the centre as of the last pull
        self.centers = [np.empty_like(array) for array in shapes]
        self._elastic = isinstance(rule, Elastic)
        keep = 1.0 - rule.alpha if isinstance(rule, Elastic) else rule.keep
        self._attract = Elastic2(alpha=rule.alpha if isinstance(rule, Elastic) else 1.0 - keep)
        # True if a worker takes the centre as it is and keeps nothing of its own parameters
        self._copies = not self._elastic and keep == 0.0

    def _bytes_of(self, place: int) -> int:
        """Return how many bytes of a parameter go to the store and come back. Pushes to servers may be compressed."""
        worker, nbytes = self._kv.worker, self.centers[place].nbytes
        key, compressor = worker.keys[self._keys[place]], worker.compressor
        if compressor is not None and self._kv.layout.num_servers and key.floats:
            return nbytes + compressor.max_bytes(key.size)
        return 2 * nbytes

    @quiet
    def prepare(self, parameters: Arrays, places: Sequence[int]) -> None:
        """Compute what to push."""
        for place in places:
            parameter, pushed = parameters[place], self._pushed[place]
            if self._elastic:
                # The members of a client push equal values, and the store gets their sum.
                np.divide(parameter, self._members, out=pushed)
            else:
                np.subtract(self.centers[place], parameter, out=pushed)

    @quiet
    def weigh(self, places: Sequence[int], factor: float) -> None:
        """Multiply what is to be pushed by a factor. With 0 the result is 0, even where it was NaN."""
        for place in places if factor != 1.0 else ():
            if factor:
                np.multiply(self._pushed[place], factor, out=self._pushed[place])
            else:
                self._pushed[place][...] = 0

    def send(self, places: Sequence[int], wait: bool = True) -> Handle | None:
        """Push what was prepared, and pull the centre. Blocking if `wait`; otherwise return a handle."""
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
        """Make zeros of what is to be pushed."""
        for pushed in self._pushed:
            pushed[...] = 0

    def take(self, parameters: Arrays, places: Sequence[int]) -> None:
        """Move parameters towards the centre that has arrived."""
        for place in places:
            parameter, center = parameters[place], self.centers[place]
            if self._copies:
                parameter[...] = center
            else:
                self._attract.update(parameter.reshape(-1), center.reshape(-1), (), 1)
        recorder.count_exchange(sum(map(self._bytes_of, places)))


class InFlight(NamedTuple):
    """An exchange that is under way."""

    # its fragment
    number: int
    # the step at which its centre is taken
    due: int
    # None before the push, once the centre has arrived, or if a failure has interrupted the exchange
    handle: Handle | None = None
    # True once the centre has arrived
    arrived: bool = False


class LocalRounds:
    """Counts a worker's inner steps, and exchanges each fragment of the parameters when it is due.

    All workers of a synchronous store exchange at the same steps. With a quorum each push says how many tokens (or
    inner steps) it stands for, and the servers weight it (`server.quorum`).

    Args:
        keys: The keys of the parameters in the store.
        parameters: They become the centre's values, unless this worker joins.
        by_tokens: Weight a worker's changes by its tokens. In synchronous kinds the workers sum their tokens in
            `TOKENS`, an int64 key of one element.
        joins: This worker has taken the place of a dead one, and has nothing to contribute before `rejoin`.
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
        # for each fragment the places of its parameters
        self.fragments = cut_into_fragments([array.size for array in parameters], rule.fragments)
        # for each key the round that is complete when this worker's last push is in it
        self._goals = [0] * len(keys)
        # for each fragment this worker's weight in its last exchange: tokens, or inner steps
        self._weights = [0] * len(self.fragments)
        # for each fragment the factor by which its last push was multiplied (`_weigh`)
        self._factors = [1.0] * len(self.fragments)
        self.in_flight: InFlight | None = None
        self.centers = self._exchange.centers
        self.begin_at(0)
        if not joins:
            self.average_over_workers()
            self._exchange.pull(range(len(keys)))
            self.share(parameters)

    def average_over_workers(self) -> None:
        """Let the outer optimizer take the mean over the present workers. Collective, blocking.

        After a load from a checkpoint, or after a death, its rescale may be that of another number of workers.
        """
        outer = averaged(self._rule.optimizer, workers_in_a_sum(self._kv))
        now = self._kv.worker.groups.of(self._keys[0])
        if now.rescale != outer.rescale:  # type: ignore[union-attr, attr-defined]
            self._kv.update_optimizer(self._keys, rescale=outer.rescale)  # type: ignore[attr-defined]

    def begin_at(self, steps: int, since: Sequence[int] = (), in_flight: InFlight | None = None) -> None:
        """Continue as if `steps` inner steps had been made.

        Args:
            since: For each fragment the tokens (or inner steps) since its last exchange. By default the number of
                inner steps.
            in_flight: An exchange whose centre has arrived and is taken at a later step.
        """
        self.steps, self.in_flight = steps, in_flight
        # for each fragment the step at which its last exchange began
        self._begun = [max(steps - self._after(number, steps), 0) for number in range(len(self.fragments))]
        # for each fragment the tokens, or inner steps, since its last exchange began
        self.since = list(since) or [steps - begun for begun in self._begun]

    def _after(self, number: int, steps: int) -> int:
        """Return how many steps ago the fragment's exchange was due."""
        return (steps - (number + 1) * self._rule.every // len(self.fragments)) % self._rule.every

    def step(self, parameters: Arrays, tokens: int = 0) -> None:
        """Count an inner step, take a centre whose time has come, and begin the exchanges that are due.

        `tokens` is the number of tokens that the step trained on.
        """
        self.steps += 1
        self.since = [count + (tokens if self._by_tokens else 1) for count in self.since]
        if self.in_flight is not None and self.in_flight.handle is None and not self.in_flight.arrived:
            # A failure has interrupted it, and no recovery has made it again.
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
            # Usually pushes advance a checkpoint that is being written in the background. Here pushes are rare, so each
            # step must.
            saving.go_on()

    def _prepare(self, number: int, parameters: Arrays) -> None:
        """Begin a fragment's exchange. From now on it must be made, also after a recovery."""
        places = self.fragments[number]
        self._exchange.prepare(parameters, places)
        for place in places:
            self._goals[place] = self._round(place) + 1
        self._begun[number], self._factors[number] = self.steps, 1.0
        self._weights[number], self.since[number] = self.since[number], 0
        self.in_flight = InFlight(number, self.steps + self._rule.delay)

    def _send(self, number: int, places: Sequence[int], wait: bool = True) -> Handle | None:
        """Push what was prepared for places of a fragment, and pull the centre. Blocking if `wait`."""
        for place in places if self._quorum else ():
            self._kv.worker.keys[self._keys[place]].weight = self._weights[number]
        return self._exchange.send(places, wait)

    def _sum_of_tokens(self, number: int) -> int:
        """Return the tokens of all workers since the last exchange of a fragment. Collective, blocking."""
        total = np.array([self._weights[number]])
        self._kv.pushpull(TOKENS, total)
        return int(total[0])

    def _weigh(self, number: int, total: int) -> None:
        """Multiply a worker's changes of a fragment by its share of the total weight, times the number of workers.

        The store takes a plain mean over the workers. With this factor it becomes a mean weighted by tokens or steps.
        If the changes were multiplied before, that factor is divided out.
        """
        share = self._weights[number] * self._kv.num_workers / total if total else 1.0
        before, self._factors[number] = self._factors[number], share
        self._exchange.weigh(self.fragments[number], share / before if share and before else 0.0)

    def wait(self) -> None:
        """Wait until the centre of the exchange that is under way has arrived. It is taken later, when it is due."""
        if self.in_flight is not None and (handle := self.in_flight.handle) is not None:
            self.in_flight = self.in_flight._replace(handle=None)
            handle.wait()
            self.in_flight = self.in_flight._replace(arrived=True)

    def finish(self, parameters: Arrays) -> None:
        """Wait for the exchange that is under way, and take its centre now."""
        self.wait()
        if self.in_flight is not None:
            self._exchange.take(parameters, self.fragments[self.in_flight.number])
            self.in_flight = None

    def share(self, parameters: Arrays, newest: bool = False) -> None:
        """Set the parameters to the centre, which in a synchronous store is the same on all workers.

        Changes since the last exchange, and their tokens, are dropped.

        Args:
            newest: Pull the centre first. By default the parameters become the centre that this worker pulled last.
        """
        self.finish(parameters)
        self.since = [0] * len(self.since)
        if newest:
            self._exchange.pull(range(len(self._keys)))
        for parameter, center in zip(parameters, self.centers):
            parameter[...] = center

    # ---- after a death

    def rejoin(self, parameters: Arrays) -> None:
        """Continue after `kv.recover()`, and make the exchanges that were under way.

        Collective over all workers, blocking. In a synchronous store:

        1. All continue from the step of the worker that is furthest. It is in an exchange of a fragment.
        2. The others make this exchange, too. The weight of each is the inner steps (or tokens) that it has made since
           its last exchange, and 0 if it has just joined.
        3. An exchange that the recovery has undone is made again, with the same changes.

        In an asynchronous store each worker continues from its own step, and a worker that joins from that of the
        slowest one.
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
        # The exchange is complete in the store, and only its centre has not arrived.
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
        """Jump to the step of the worker that is ahead. Return the fragments whose exchange began between the two."""
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
        """Return the places of a fragment for which the store does not have this worker's last exchange."""
        return [place for place in self.fragments[number] if self._goals[place] > self._round(place)]

    def _round(self, place: int) -> int:
        return self._kv.worker.keys[self._keys[place]].round


class LocalProgress(msgspec.Struct, array_like=True, frozen=True):
    """How far a worker has come, which it tells the others when all meet after a death.

    The fields are those of `LocalRounds`.
    """

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
    """Cut a list of arrays into `parts` runs of about equally many elements. No run is empty.

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
