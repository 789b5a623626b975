"""What workers that train apart exchange, and when: local SGD, DiLoCo and elastic averaging.

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
OUTER = {"nesterov": SGD(0.7, momentum=0.9, nesterov=True), "average": SGD(1.0)}
"""Outer optimizers by name: DiLoCo's, and local SGD's, which takes the mean of all workers' parameters."""
TOKENS = "mpips/tokens"
"""The key of the sum of all workers' tokens, in synchronous kinds."""
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
        """Return the outer optimizer, as if there were one worker."""
        return OUTER[self.outer] if isinstance(self.outer, str) else self.outer


def averaged(optimizer: Optimizer, workers: float) -> Optimizer:
    """Return the optimizer for gradients that arrive as a sum over workers: `rescale` divided by their number."""
    if "rescale" not in {field.name for field in fields(optimizer)}:
        raise ValueError(f"{optimizer!r} has no rescale: a Trainer needs an optimizer of gradients")
    return replace(optimizer, rescale=optimizer.rescale / workers)  # type: ignore[call-arg, attr-defined]


def workers_in_a_sum(kv: KVStore) -> float:
    """Return how many workers' gradients make one update: all of a synchronous store, a client's of another.

    Where clients differ in size it is their mean: a store has one optimizer, and larger clients take larger steps.
    """
    return kv.num_workers / len(kv.layout.clients) if kv.layout.asynchronous else kv.num_workers


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

    def _bytes_of(self, place: int) -> int:
        """Return the bytes of a parameter that go to the store and come back: those to servers may be compressed."""
        worker, nbytes = self._kv.worker, self.centers[place].nbytes
        key, compressor = worker.keys[self._keys[place]], worker.compressor
        if compressor is not None and self._kv.layout.num_servers and key.floats:
            return nbytes + compressor.max_bytes(key.size)
        return 2 * nbytes

    @quiet
    def measure(self, parameters: Arrays, places: Sequence[int]) -> None:
        """Write down what is to be said of the parameters in these places."""
        for place in places:
            parameter, pushed = parameters[place], self._pushed[place]
            if self._elastic:
                np.divide(parameter, self._members, out=pushed)  # a push sums over members, who are equal
            else:
                np.subtract(self.centers[place], parameter, out=pushed)

    @quiet
    def weigh(self, places: Sequence[int], factor: float) -> None:
        """Let what is written down count by a factor; 0: not at all, whatever it is."""
        for place in places if factor != 1.0 else ():
            if factor:
                np.multiply(self._pushed[place], factor, out=self._pushed[place])
            else:
                self._pushed[place][...] = 0

    def send(self, places: Sequence[int], wait: bool = True) -> Handle | None:
        """Push what is written down, and ask for the centre; blocking if `wait`."""
        keys, centers = [self._keys[place] for place in places], [self.centers[place] for place in places]
        said = [self._pushed[place] for place in places]
        if wait:
            self._kv.pushpull(keys, said, out=centers)
            return None
        return self._kv.ipushpull(keys, said, out=centers)

    def pull(self, places: Sequence[int]) -> None:
        """Ask for the centre alone; blocking."""
        self._kv.pull([self._keys[place] for place in places], [self.centers[place] for place in places])

    def forget(self) -> None:
        """Have nothing to say of any parameter."""
        for pushed in self._pushed:
            pushed[...] = 0

    def take(self, parameters: Arrays, places: Sequence[int]) -> None:
        """Move parameters towards the centre, which has come."""
        for place in places:
            parameter, center = parameters[place], self.centers[place]
            if self._whole:
                parameter[...] = center
            else:
                self._attract.update(parameter.reshape(-1), center.reshape(-1), (), 1)
        recorder.count_exchange(sum(map(self._bytes_of, places)))


class Open(NamedTuple):
    """Keep an exchange that is under way: its fragment, and the step at which the centre is taken."""

    number: int
    due: int
    handle: Handle | None = None
    come: bool = False
    """Whether the centre has come. With neither, the exchange was broken off."""


class LocalRounds:
    """Count a worker's inner steps, and exchange each fragment when it is due. All workers make equally many.

    `by_tokens`: workers count by their tokens. In synchronous kinds they sum them in `TOKENS`, an int64 key of one
    element. `joins`: this worker has taken a dead one's place, and has nothing before `rejoin`.

    With a quorum each push says how many tokens, or inner steps, it is of, and the servers weigh it (`server.quorum`).
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
        self._rule, self._kv, self._by_tokens, self._keys, self._joins = rule, kv, by_tokens, list(keys), joins
        self._quorum = kv.layout.asynchronous and kv.layout.options.quorum >= 0
        self._exchange = Exchange(kv, keys, parameters, rule, 1)
        self.fragments = cut([array.size for array in parameters], rule.fragments)
        """Places of the parameters of each fragment."""
        self._goals = [0] * len(keys)
        """The round of each key that this worker's last push makes."""
        self._counts = [0] * len(self.fragments)
        """By how much each fragment's last exchange counts: tokens, or inner steps."""
        self._shares = [1.0] * len(self.fragments)
        """The factors in what was pushed then."""
        self.open: Open | None = None
        self.centers = self._exchange.centers
        self.begin_at(0)
        if not joins:
            self.see_workers()
            self._exchange.pull(range(len(keys)))
            self.share(parameters)

    def see_workers(self) -> None:
        """Let the outer optimizer take the mean over the workers that are here, whatever it took in a checkpoint, or
        before a death. Collective, blocking."""
        outer = averaged(self._rule.optimizer, workers_in_a_sum(self._kv))
        now = self._kv.worker.groups.of(self._keys[0])
        if now.rescale != outer.rescale:  # type: ignore[union-attr, attr-defined]
            self._kv.update_optimizer(self._keys, rescale=outer.rescale)  # type: ignore[attr-defined]

    def begin_at(self, steps: int, since: Sequence[int] = (), open_: Open | None = None) -> None:
        """Go on as behind so many inner steps. `since`: of each fragment the tokens since its last exchange; `open_`:
        whose centre has come and is not due."""
        self.steps, self.open = steps, open_
        self._begun = [max(steps - self._after(number, steps), 0) for number in range(len(self.fragments))]
        """The step at which each fragment's last exchange began."""
        self.since = list(since) or [steps - begun for begun in self._begun]
        """Tokens, or inner steps, since then."""

    def _after(self, number: int, steps: int) -> int:
        """Return how many steps a fragment's exchange was due ago."""
        return (steps - (number + 1) * self._rule.every // len(self.fragments)) % self._rule.every

    def step(self, parameters: Arrays, tokens: int = 0) -> None:
        """An inner step of so many tokens has been made: take the centre that is due; begin the exchange that is."""
        self.steps += 1
        self.since = [count + (tokens if self._by_tokens else 1) for count in self.since]
        if self.open is not None and self.open.handle is None and not self.open.come:
            self.open = None  # it was broken off, and nobody has made it since
        elif self.open is not None and self.steps >= self.open.due:
            self.finish(parameters)
        for number, places in enumerate(self.fragments):
            if self._after(number, self.steps):
                continue
            self._measure(number, parameters)
            if self._by_tokens and not self._quorum:
                self._weigh(number, self._sum_of_tokens(number))
            handle = self._send(number, places, wait=not self._rule.delay)
            if handle is None:
                self.finish(parameters)
            else:
                self.open = Open(number, self.steps + self._rule.delay, handle)
        if (saving := self._kv.worker.saving) is not None:
            saving.go_on()  # else pushes see to a checkpoint that is being written, and here they are rare

    def _measure(self, number: int, parameters: Arrays) -> None:
        """Begin a fragment's exchange: from now on it is made, whatever happens."""
        places = self.fragments[number]
        self._exchange.measure(parameters, places)
        for place in places:
            self._goals[place] = self._round(place) + 1
        self._begun[number], self._shares[number] = self.steps, 1.0
        self._counts[number], self.since[number] = self.since[number], 0
        self.open = Open(number, self.steps + self._rule.delay)

    def _send(self, number: int, places: Sequence[int], wait: bool = True) -> Handle | None:
        """Push what is written down of places of a fragment, and ask for the centre; blocking if `wait`."""
        for place in places if self._quorum else ():
            self._kv.worker.keys[self._keys[place]].weight = self._counts[number]
        return self._exchange.send(places, wait)

    def _sum_of_tokens(self, number: int) -> int:
        """Return how many tokens all workers' changes of a fragment are of. Blocking."""
        total = np.array([self._counts[number]])
        self._kv.pushpull(TOKENS, total)
        return int(total[0])

    def _weigh(self, number: int, total: int) -> None:
        """Weigh a worker's changes of a fragment by its share of the total times the workers: the store takes a mean"""
        share = self._counts[number] * self._kv.num_workers / total if total else 1.0
        before, self._shares[number] = self._shares[number], share
        self._exchange.weigh(self.fragments[number], share / before if share and before else 0.0)

    def wait(self) -> None:
        """Wait until the centre of what is under way has come. It is taken when it is due."""
        if self.open is not None and (handle := self.open.handle) is not None:
            self.open = self.open._replace(handle=None)
            handle.wait()
            self.open = self.open._replace(come=True)

    def finish(self, parameters: Arrays) -> None:
        """Wait for what is under way, and take it."""
        self.wait()
        if self.open is not None:
            self._exchange.take(parameters, self.fragments[self.open.number])
            self.open = None

    def share(self, parameters: Arrays, newest: bool = False) -> None:
        """Take the centre as this worker has seen it last: the same on all, where the store is synchronous. `newest`:
        take it as it is now. What was changed since, and the tokens of that, do not count."""
        self.finish(parameters)
        self.since = [0] * len(self.since)
        if newest:
            self._exchange.pull(range(len(self._keys)))
        for parameter, center in zip(parameters, self.centers):
            parameter[...] = center

    # ---- after a death

    def rejoin(self, parameters: Arrays) -> None:
        """Go on after `kv.recover()`: what was under way is exchanged. Collective over all workers, blocking.

        In a synchronous store all go on from the step of the one that is furthest, which is in an exchange. Each counts
        in it by the inner steps (or tokens) that it has made since the last one: who has just joined counts for
        nothing. An exchange that the recovery has undone is made again, too, with the same changes.
        """
        kv, synchronous = self._kv, not self._kv.layout.asynchronous
        mine = Standing(self.steps, self._goals, self._begun, self._counts, self.since, self._joins)
        told = kv.worker.agree("local training: all meet anew", data=msgspec.msgpack.encode(mine))
        words = [msgspec.msgpack.decode(data, type=Standing) for data in told]
        there = [word for word in words if not word.joins]
        if not there:
            raise LostError("local training: no worker is left that knows its step: go on from a checkpoint")
        if synchronous:
            self.see_workers()
        due = [] if self.open is None else [self.open.number]
        numbers = range(len(self.fragments)) if synchronous or self._joins else due
        if numbers:
            self._exchange.pull([place for number in numbers for place in self.fragments[number]])
        if due and not self._unmade(due[0]):  # it is complete, and did not come through
            self._exchange.take(parameters, self.fragments[due.pop()])
        if self._quorum and (lost := max(goal - self._round(place) for place, goal in enumerate(self._goals)) - 1) > 0:
            LOG.warning("local training: %d of this worker's exchanges that came late are lost with their server", lost)
        ahead = max(there, key=steps_of) if synchronous else min(there, key=steps_of)
        if self._joins or (synchronous and self.steps < ahead.steps):
            due += self._catch_up(parameters, ahead, synchronous)
        for number in sorted(range(len(self.fragments)), key=self._begun.__getitem__):
            if again := self._unmade(number):
                if synchronous:
                    self._weigh(number, sum(word.counted(number, ahead) for word in words))
                self._send(number, again)
        for number in due:
            self._exchange.take(parameters, self.fragments[number])
        self.open = None
        if self._joins:
            self._joins = False
            self.share(parameters)

    def _catch_up(self, parameters: Arrays, ahead: Standing, synchronous: bool) -> list[int]:
        """Come to the step of the worker that is ahead; return the fragments whose exchange begins by that."""
        LOG.warning(
            "local training: this worker goes on at step %d%s",
            ahead.steps,
            ", from the outer parameters" if self._joins else f", and leaves out {ahead.steps - self.steps}",
        )
        before, self.steps = self._begun, ahead.steps
        begins = [] if self._joins else [n for n, begun in enumerate(before) if begun < ahead.begun[n]]
        for number in begins:
            self._measure(number, parameters)
        self._begun = list(ahead.begun)
        self._goals = list(ahead.goals) if synchronous else [self._round(place) for place in range(len(self._keys))]
        if self._joins:
            self._exchange.forget()
            self._counts, self.since = [0] * len(self.fragments), [0] * len(self.fragments)
            self._shares = [1.0] * len(self.fragments)
        return begins

    def _unmade(self, number: int) -> list[int]:
        """Return the places of a fragment whose last exchange the store has not."""
        return [place for place in self.fragments[number] if self._goals[place] > self._round(place)]

    def _round(self, place: int) -> int:
        return self._kv.worker.keys[self._keys[place]].round


class Standing(msgspec.Struct, array_like=True, frozen=True):
    """Tell the others, when all meet after a death, where a worker stands; fields as in `LocalRounds`."""

    steps: int
    goals: list[int]
    begun: list[int]
    counts: list[int]
    since: list[int]
    joins: bool

    def counted(self, number: int, ahead: Standing) -> int:
        """Return by how much this worker counts in the exchange of a fragment in which the one `ahead` is."""
        if self.joins:
            return 0
        return self.counts[number] if self.begun[number] == ahead.begun[number] else self.since[number]


def steps_of(standing: Standing) -> int:
    """Return how many inner steps a worker has made."""
    return standing.steps


def cut(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Cut arrays of these sizes, in their order, into so many runs of about equally many elements; no run is empty.

    ValueError where there are fewer arrays than parts.
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
