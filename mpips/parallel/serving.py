"""What updates a worker's slice where servers keep the network: see `served`."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from mpips.optimizers import Elastic1, Elastic2, Optimizer, State, initial
from mpips.runtime.engine import Handle
from mpips.worker.backend import States
from mpips.worker.settings import Settings

from .agreement import TrainingError, agree
from .clock import Clock
from .funnel import Funnel
from .grid import Grid
from .loss_scale import LossScale
from .network import Network
from .served import Servers
from .slices import interval
from .updates import Local, Update


def connect(
    servers: Servers, network: Network, grid: Grid, optimizer: Optimizer, clock: Clock, overlap: bool | None
) -> Update:
    """What updates a worker's slice. `overlap`: whether gradients leave during the backward pass; None: where ranks are
    on several nodes. Collective over the job."""
    if problem := _refusal(servers, network, overlap):
        servers.give_up(problem)
        raise TrainingError(problem)
    kind = Sync if servers.kind == "sync" else Elastic
    return kind(servers, network, grid, optimizer, clock, servers.between if overlap is None else overlap)


def _refusal(servers: Servers, network: Network, overlap: bool | None) -> str | None:
    if network.specification.dtype == "mixed":
        return "servers keep weights and take gradients in one dtype: choose float32, not mixed"
    if overlap and servers.kind == "sync" and servers.groups < network.exchange.parts:
        return (
            f"{servers.count} servers for {network.exchange.parts} slices: gradients pass through one rank of several, "
            f"all at once, so there is nothing to overlap; give a server for each slice"
        )
    return None


def _opened(
    servers: Servers, funnel: Funnel, whole: np.ndarray, optimizer: Optimizer
) -> tuple[Any, dict[str, np.ndarray]]:
    """The store that keeps `whole`, and the array of each of its keys. (None, {}) where this rank does not speak to
    servers, and where there is nothing to keep: slices may be empty. Collective over the job."""
    kv = servers.open()
    named = funnel.keyed(whole) if kv is not None else {}
    if kv is None or not named:
        return None, {}
    kv.init(list(named), list(named.values()))
    kv.set_optimizer(optimizer)
    return kv, named


class Sync:
    """Push gradients, pull weights: one key a layer of each slice."""

    def __init__(
        self, servers: Servers, network: Network, grid: Grid, optimizer: Optimizer, clock: Clock, overlap: bool
    ) -> None:
        self._grid, self._network, self._optimizer, self._clock = grid, network, optimizer, clock
        self.loss_scale: LossScale | None = None
        self._funnel = funnel = Funnel(network, grid.model_comm, servers.groups)
        self._overlap = overlap and funnel.alone
        self._gradients, self._weights = (
            funnel.whole(flat) for flat in (network.flat_gradients, network.flat_parameters)
        )
        funnel.up(network.flat_parameters, self._weights)
        self._kv, self._in = _opened(servers, funnel, self._weights, optimizer)
        self._out = funnel.keyed(self._gradients) if self._in else {}
        self._keys = list(self._out)
        self._pushes: list[Handle] = []
        self._read = 0  # pushes, from the first on, that are known to have been read

    def gradient(self, layer: int) -> None:
        """The gradients of a layer leave, the first layers' with the highest priority."""
        key = f"slice{self._funnel.first}.layer{layer}"
        if self._overlap and key in self._out:
            start = perf_counter()
            self._pushes.append(self._kv.ipush(key, self._out[key], priority=-layer))
            self._clock.sent()
            self._clock.add("backward", start)

    def poll(self) -> None:
        """Move on what has left."""
        while self._read < len(self._pushes) and self._pushes[self._read].test():
            self._read += 1
            self._clock.arrived()

    def share(self, samples: int) -> float:
        return samples

    def run(self, step: int) -> None:
        start = perf_counter()
        self._clock.sent()
        if self._pushes:
            pulls = [
                self._kv.ipull(key, array, priority=-number) for number, (key, array) in enumerate(self._in.items())
            ]
            for handle in (*self._pushes, *pulls):
                handle.wait()
            for _ in self._pushes[self._read :]:
                self._clock.arrived()
            self._pushes.clear()
            self._read = 0
        else:
            self._funnel.up(self._network.flat_gradients, self._gradients)
            if self._kv is not None:
                self._kv.pushpull(self._keys, list(self._out.values()), out=list(self._in.values()))
            self._funnel.down(self._weights, self._network.flat_parameters)
        self._clock.arrived()
        self._clock.add("backward", start)

    def fetch(self) -> State:
        state = initial(self._optimizer, self._network.flat_parameters)
        wholes = [self._funnel.whole(array) for array in state]

        def work(store: Settings) -> None:
            found = store.run("fetch", store.backend.states([store.keys[name] for name in self._in]))
            if self._grid.batch_index == 0:
                views = [self._funnel.keyed(whole) for whole in wholes]
                for name, (_, arrays) in found.items():
                    for view, array in zip(views, arrays):
                        view[str(name)][...] = array

        if state:
            self._together(work)
        for whole, array in zip(wholes, state):
            self._funnel.down(whole, array)
        return state

    def restore(self, state: State, step: int) -> None:
        wholes = [self._funnel.whole(array) for array in state]
        for whole, array in zip(wholes, state):
            self._funnel.up(array, whole)

        def work(store: Settings) -> None:
            views = [self._funnel.keyed(whole) for whole in wholes]
            states: States = {name: (step, [view[name] for view in views]) for name in self._keys}
            store.run("restore", store.backend.put_states([store.keys[name] for name in self._keys], states))

        if state:
            self._together(work)

    def _together(self, work: Callable[[Settings], None]) -> None:
        """Let the speakers of a group work with what their servers keep, when all that was pushed has been applied."""
        problem = None
        if self._kv is not None:
            try:
                self._kv.settings.settle()
                work(self._kv.settings)
            except ValueError as error:
                problem = f"the servers' optimizer states: {error}"
        agree(self._grid.comm, problem)


class Elastic:
    """SGD inside the client, on the mean over the client's share of each minibatch; elastic averaging now and then."""

    def __init__(
        self, servers: Servers, network: Network, grid: Grid, optimizer: Optimizer, clock: Clock, overlap: bool
    ) -> None:
        self._clock, self._every, self._weights = clock, servers.every, network.flat_parameters
        self._ranks, self._members = grid.batch, grid.batch // servers.clients
        client, place = divmod(grid.batch_index, self._members)
        self._first, self._samples = grid.batch_index - place, 0
        comm = grid.batch_comm.Split(client, place)
        self._local = Local(network, comm, optimizer, clock, overlap, half=False, scale=None)
        self.loss_scale: LossScale | None = None
        self.fetch, self.restore, self.poll = self._local.fetch, self._local.restore, self._local.poll
        self._attract = Elastic2(alpha=servers.alpha)
        self._centre = np.empty_like(network.flat_parameters)
        self._funnel = Funnel(network, grid.model_comm, servers.groups)
        self._whole = self._funnel.whole(self._centre)
        self._centre[...] = self._weights
        self._funnel.up(self._centre, self._whole)
        self._kv, self._centres = _opened(servers, self._funnel, self._whole, Elastic1(alpha=servers.alpha))

    def gradient(self, layer: int) -> None:
        """The gradients of a layer are summed over the client."""
        if self._samples:
            self._local.gradient(layer)

    def share(self, samples: int) -> float:
        """The samples of this client."""
        last = self._first + self._members - 1
        start, stop = interval(samples, self._ranks, self._first)[0], interval(samples, self._ranks, last)[1]
        self._samples = stop - start
        return max(1, self._samples)

    def run(self, step: int) -> None:
        if (step - 1) % self._every == 0:
            start = perf_counter()
            self._clock.sent()
            np.divide(self._weights, self._members, out=self._centre)  # a push sums over the client, who are equal
            self._funnel.up(self._centre, self._whole)
            if self._kv is not None:
                names, arrays = list(self._centres), list(self._centres.values())
                self._kv.push(names, arrays)
                self._kv.pull(names, arrays)
            self._funnel.down(self._whole, self._centre)
            self._attract.update(self._weights, self._centre, (), 1)
            self._clock.arrived()
            self._clock.add("backward", start)
        if self._samples:
            self._local.run(step)
