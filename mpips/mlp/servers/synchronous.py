"""Synchronous servers: they sum gradients over all clients and run the optimizer; a worker pushes and pulls."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from mpips.optimizers.base import Optimizer, State, initial
from mpips.store.checkpoint.source import Handle, States, Store

from mpips.mlp.agreement import agree
from mpips.mlp.clock import Clock
from mpips.mlp.data_parallel import LossScale
from mpips.mlp.mesh import Mesh
from mpips.mlp.network.network import Network
from mpips.mlp.servers.leaders import SliceGroup, WeightStore


class Synchronous:
    """An `Update` through servers: push gradients, pull weights, one key a layer of each slice.

    `store` is None on a worker that does not speak to servers. Collective over the workers.
    """

    def __init__(
        self, store: WeightStore | None, group: SliceGroup, network: Network, mesh: Mesh, optimizer: Optimizer,
        clock: Clock, overlap: bool,
    ) -> None:  # fmt: skip
        self._mesh, self._network, self._optimizer, self._clock = mesh, network, optimizer, clock
        self.loss_scale: LossScale | None = None
        self._group = group
        self._overlap = overlap and group.alone
        self._gradients, self._weights = (
            group.whole(flat) for flat in (network.flat_gradients, network.flat_parameters)
        )
        group.gather(network.flat_parameters, self._weights)
        self._in = group.keep(store, self._weights, optimizer)
        self._kv = store if self._in else None
        self._out = group.keyed(self._gradients) if self._in else {}
        self._keys = list(self._out)
        self._pushes: list[Handle] = []
        self._read = 0  # pushes, from the first on, that are known to have been read

    def gradient(self, layer: int) -> None:
        """The gradients of a layer leave, the first layers' with the highest priority."""
        key = f"slice{self._group.first}.layer{layer}"
        if self._kv is not None and self._overlap and key in self._out:
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
        if self._kv is not None and self._pushes:
            kv = self._kv
            pulls = [kv.ipull(key, array, priority=-number) for number, (key, array) in enumerate(self._in.items())]
            for handle in (*self._pushes, *pulls):
                handle.wait()
            for _ in self._pushes[self._read :]:
                self._clock.arrived()
            self._pushes.clear()
            self._read = 0
        else:
            self._group.gather(self._network.flat_gradients, self._gradients)
            if self._kv is not None:
                self._kv.pushpull(self._keys, list(self._out.values()), out=list(self._in.values()))
            self._group.scatter(self._weights, self._network.flat_parameters)
        self._clock.arrived()
        self._clock.add("backward", start)

    def fetch(self) -> State:
        state = initial(self._optimizer, self._network.flat_parameters)
        wholes = [self._group.whole(array) for array in state]

        def work(store: Store) -> None:
            found = store.run("fetch", store.backend.stored.states([store.keys[name] for name in self._in]))
            if self._mesh.batch_index == 0:
                views = [self._group.keyed(whole) for whole in wholes]
                for name, (_, arrays) in found.items():
                    for view, array in zip(views, arrays):
                        view[str(name)][...] = array

        if state:
            self._together(work)
        for whole, array in zip(wholes, state):
            self._group.scatter(whole, array)
        return state

    def restore(self, state: State, step: int) -> None:
        wholes = [self._group.whole(array) for array in state]
        for whole, array in zip(wholes, state):
            self._group.gather(array, whole)

        def work(store: Store) -> None:
            views = [self._group.keyed(whole) for whole in wholes]
            states: States = {name: (step, [view[name] for view in views]) for name in self._keys}
            store.run("restore", store.backend.stored.put_states([store.keys[name] for name in self._keys], states))

        if state:
            self._together(work)

    def _together(self, work: Callable[[Store], None]) -> None:
        """Let the speakers of a group work with what their servers keep, when all that was pushed has been applied."""
        problem = None
        if self._kv is not None:
            try:
                self._kv.settings.settle()
                work(self._kv.settings)
            except ValueError as error:
                problem = f"the servers' optimizer states: {error}"
        agree(self._mesh.comm, problem)
