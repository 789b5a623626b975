"""The exchanges of a step: sums of gradients between batch ranks, gathers and sums between model ranks.

Source: the paper, section 5, Algorithm 1 (data parallelism), and section 6, Algorithm 2 (tensor parallelism, which the
paper calls model parallelism).

Gradients are summed in buckets of whole layers, from the last layer to the first. With overlap, the sum of a bucket is
started as soon as the gradient of its lowest layer is complete, and runs during the rest of the backward pass. Without
overlap, buckets are summed one by one after the backward pass. With and without overlap, the results are equal bit for
bit.

With `half`, arrays travel as float16. An array is rounded into a copy, and the copy is summed or gathered. Every rank,
including the sender, takes the result from the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import numpy as np
from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives import Plan, plan
from mpips.collectives.kernels.quiet import quiet
from mpips.mlp.clock import PhaseClock
from mpips.mlp.mesh import Mesh
from mpips.mlp.network import Network, interval
from mpips.optimizers.base import Optimizer, State
from mpips.optimizers.equation import prepare

# layers are added to a bucket until it has this many bytes or more
BUCKET_BYTES = 256 << 10
# the loss scale of mixed precision: at the start, and its limits
START_SCALE, LEAST_SCALE, MOST_SCALE = 2.0**10, 1.0, 2.0**24
# consecutive updates without overflow after which the loss scale doubles
GROWTH = 2000


# ---- arrays in host memory or on a GPU


def on_host(array: np.ndarray) -> np.ndarray:
    """Return the array itself, or a copy in host memory if it is on a GPU."""
    return array if isinstance(array, np.ndarray) else array.get()


def put(source: np.ndarray, target: np.ndarray) -> None:
    """Copy `source`, which is in host memory, to `target`, which is in host memory or on a GPU."""
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.set(np.ascontiguousarray(source, target.dtype))


# ---- collectives of one array each


class RepeatedCollective:
    """An allreduce or allgather of one array over `comm`, in place, that is run many times.

    `run` runs it and blocks. An allreduce can also be run by `start`, `test` and `wait`. On one node, an array made by
    `collectives.empty` is exchanged in shared memory, without messages. If the array is empty or there is only one
    rank, every call does nothing. Creating a `RepeatedCollective` is collective.

    Args:
        kind: "allreduce" or "allgather". For "allgather" the array is (rows, columns), and each rank has written its
            `interval` of rows.
        phase: The name of the phase of a step, such as "forward". `clock` adds the time that the computation spends in
            this collective to this phase.
        half: Send float16.
    """

    def __init__(
        self, kind: str, array: np.ndarray, comm: MPI.Comm, clock: PhaseClock, phase: str, half: bool = False
    ) -> None:
        self._array = array
        self._clock = clock
        self._phase = phase
        self._own = slice(*interval(len(array), comm.size, comm.rank)) if kind == "allgather" else slice(None)
        # runs the collective and blocks; None if there is nothing to do
        self._call: Callable[[], object] | None = None
        self._plan: Plan | None = None
        # The copy that is sent in place of `array`: in float16, or in host memory for an allgather of a GPU's array,
        # which MPI cannot read. None if `array` itself is sent.
        self._copy: np.ndarray | None = None
        self._under_way = False
        if not array.size or comm.size == 1:
            return
        wire = array
        if half or (kind == "allgather" and not isinstance(array, np.ndarray)):
            wire = self._copy = collectives.empty(array.shape, np.float16 if half else array.dtype, comm)
        if kind == "allgather" and len(array) % comm.size:
            # `collectives` gathers equal blocks only.
            row = wire.nbytes // len(array)
            bounds = [interval(len(array), comm.size, rank) for rank in range(comm.size)]
            counts = [(stop - start) * row for start, stop in bounds], [start * row for start, _ in bounds]
            self._call = partial(comm.Allgatherv, MPI.IN_PLACE, [wire, *counts, MPI.BYTE])
        else:
            self._call = self._plan = plan(kind, wire, comm)

    def run(self) -> None:
        if self._call:
            with self._clock.waiting(self._phase):
                self._write_copy()
                self._call()
                self._read_copy()

    def start(self) -> None:
        """Start the allreduce without waiting for it."""
        if self._plan:
            begin = perf_counter()
            self._write_copy()
            self._plan.start()
            self._under_way = True
            self._clock.sent()
            self._clock.add(self._phase, begin)

    def test(self) -> bool:
        """Progress the allreduce without waiting. Return True if the allreduce is done or was not started."""
        if self._plan and self._under_way and self._plan.test():
            self._under_way = False
            self._clock.arrived()
        return not self._under_way

    def wait(self) -> None:
        """Wait until the array holds the sum."""
        if self._plan:
            begin = perf_counter()
            self._plan.wait()
            self._read_copy()
            if self._under_way:
                self._under_way = False
                self._clock.arrived()
            self._clock.add(self._phase, begin)

    def free(self) -> None:
        if self._plan:
            self._plan.free()

    def _write_copy(self) -> None:
        if self._copy is not None:
            # Numbers too large for float16 become infinite.
            with np.errstate(over="ignore"):
                self._copy[self._own] = on_host(self._array[self._own])

    def _read_copy(self) -> None:
        if self._copy is not None:
            put(self._copy, self._array)


# ---- between model ranks


class TensorExchange:
    """The `ModelExchange` over one model communicator.

    The same arrays are exchanged in every step, so a `RepeatedCollective` is made for each array at its first exchange,
    and is kept. It is found again by the address and shape of the array. This is safe because the network keeps its
    arrays alive.
    """

    def __init__(self, comm: MPI.Comm, clock: PhaseClock, half: bool = False) -> None:
        self.parts = comm.size
        self.part = comm.rank
        self._comm = comm
        self._clock = clock
        self._half = half
        # the sum that start_sum() has begun
        self._running: RepeatedCollective | None = None
        # (kind, phase, address of the array, shape) -> collective
        self._made: dict[tuple[object, ...], RepeatedCollective] = {}

    def gather(self, full: np.ndarray) -> None:
        self._collective("allgather", full, "forward").run()

    def sum(self, array: np.ndarray) -> None:
        self._collective("allreduce", array, "forward").run()

    def start_sum(self, array: np.ndarray) -> None:
        self._running = self._collective("allreduce", array, "backward")
        self._running.start()

    def poll(self) -> None:
        """Progress the sum that has been started, if any."""
        if self._running is not None:
            self._running.test()

    def wait(self) -> None:
        assert self._running is not None
        self._running.wait()
        self._running = None

    def _collective(self, kind: str, array: np.ndarray, phase: str) -> RepeatedCollective:
        interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
        key = kind, phase, interface["data"][0], array.shape
        if key not in self._made:
            self._made[key] = RepeatedCollective(kind, array, self._comm, self._clock, phase, self._half)
        return self._made[key]


# ---- between batch ranks


class LocalUpdate:
    """Sums gradients over batch ranks and runs the optimizer on every rank (Algorithms 1 and 3).

    All calls are collective over the mesh. A step calls `divisor` first, then `gradient` and `poll` during the backward
    pass, and `run` at the end.

    Weights are updated bucket by bucket, as the sums arrive. With a loss scale, all weights are updated together at the
    end, because an overflow in any bucket rejects the whole update.

    With elastic averaging, gradients are summed within each client only. If a minibatch has no samples for a client,
    that client only exchanges its weights with the centre (the weights on the servers, see `servers`).

    Args:
        mesh: The mesh of the whole job.
        clients: Number of clients into which the mesh's batch indices are divided.
        overlap: Sum buckets during the backward pass.
        half: Send float16.
        scale: The loss scale of mixed precision.
        exchange: Called with the number of each step before the step's update. It exchanges weights with the centre if
            an exchange is due.
    """

    def __init__(
        self,
        network: Network,
        mesh: Mesh,
        optimizer: Optimizer,
        clock: PhaseClock,
        overlap: bool,
        half: bool = False,
        scale: LossScale | None = None,
        clients: int = 1,
        exchange: Callable[[int], object] | None = None,
    ) -> None:
        self._network = network
        self._optimizer = optimizer
        self._overlap = overlap
        self.loss_scale = scale
        self._exchange = exchange
        members = mesh.batch // clients
        client, place = divmod(mesh.batch_index, members)
        comm = mesh.batch_comm if clients == 1 else mesh.batch_comm.Split(client, place)
        self._batch = mesh.batch
        # first and last batch index of this rank's client
        self._first, self._last = client * members, client * members + members - 1
        # samples of this client in the current minibatch
        self._samples = 0
        self._state = optimizer.init(network.flat_parameters)
        prepare(optimizer, network.flat_parameters.dtype, elements=network.flat_parameters.size)
        # layer whose gradient completes a bucket -> (slice of the flat arrays, the collective that sums the slice)
        self._buckets = {}
        for layer, start, stop in buckets(network.layer_elements, 2 if half else network.dtype.itemsize):
            gradients = network.flat_gradients[start:stop]
            sum_ = RepeatedCollective("allreduce", gradients, comm, clock, "backward", half)
            self._buckets[layer] = slice(start, stop), sum_
        self._started: list[RepeatedCollective] = []

    def divisor(self, samples: int) -> float:
        """Return the number by which this rank divides its sum of gradients in a minibatch of `samples` samples."""
        start, stop = (interval(samples, self._batch, index) for index in (self._first, self._last))
        self._samples = stop[1] - start[0]
        return max(1, self._samples) / (1 if self.loss_scale is None else self.loss_scale.scale)

    def gradient(self, layer: int) -> None:
        """Start the sum of the bucket that this layer's gradients complete, if they complete one."""
        if self._overlap and self._samples and layer in self._buckets:
            _, sum_ = self._buckets[layer]
            sum_.start()
            self._started.append(sum_)

    def poll(self) -> None:
        """Progress the sums that have been started."""
        while self._started and self._started[0].test():
            del self._started[0]

    def run(self, step: int) -> None:
        """Sum the gradients over the batch ranks, and update the weights. Blocking.

        With overlap, the sums have been started already, and this call waits for them. `step` counts from 1.
        """
        if self._exchange is not None:
            self._exchange(step)
        if not self._samples:
            return
        parameters, gradients = self._network.flat_parameters, self._network.flat_gradients
        for part, sum_ in self._buckets.values():
            if self._overlap:
                sum_.wait()
            else:
                sum_.run()
            if self.loss_scale is None:
                state = tuple(array[part] for array in self._state)
                self._optimizer.update(parameters[part], gradients[part], state, step)
        self._started.clear()
        if self.loss_scale is not None and self.loss_scale.judge(gradients):
            self._optimizer.update(parameters, gradients, self._state, step)

    def fetch(self) -> State:
        """Return the optimizer's state, laid out as the flat parameters. It is valid only on ranks of batch index 0."""
        return self._state

    def restore(self, state: State, step: int) -> None:
        """Set the optimizer's state to `state`, which is the state after `step` updates.

        Ranks that differ only in their batch index must pass equal states.
        """
        for array, saved in zip(self._state, state):
            array[...] = saved


def buckets(elements: Sequence[int], itemsize: int) -> list[tuple[int, int, int]]:
    """Cut the flat gradients into buckets of whole layers, in the order of the backward pass.

    Each bucket but the last has `BUCKET_BYTES` or more.

    Args:
        elements: Number of elements of each layer.
        itemsize: Bytes of an element when it is sent.

    Returns:
        (layer, start, stop) of each bucket: its lowest layer, and its interval of the flat gradients. A bucket is
        complete when the gradient of its lowest layer is complete.
    """
    cut = []
    stop = start = sum(elements)
    for layer in range(len(elements) - 1, -1, -1):
        start -= elements[layer]
        if (stop - start) * itemsize >= BUCKET_BYTES or layer == 0:
            cut.append((layer, start, stop))
            stop = start
    return cut


class LossScale:
    """The loss scale of mixed precision, equal on all ranks of a mesh.

    Gradients are multiplied by the scale before they travel as float16, so that small gradients do not become 0. The
    scale adapts. If gradients overflow float16, the update is skipped and the scale is halved. After `GROWTH`
    consecutive updates without overflow, the scale doubles.

    All ranks of the mesh must make the same decision. The network's gradients are cut into slices, one for each model
    rank. The batch ranks that hold the same slice have summed its gradients, so they all check the same sums. The ranks
    of one model check different slices, and an overflow may be in only one slice. So each of these ranks contributes 1
    to a sum if it has found an overflow. If the sum is above 0, all of them skip the update.

    Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2.
    """

    def __init__(self, model_comm: MPI.Comm) -> None:
        self.scale = START_SCALE
        # updates without overflow since the scale last changed
        self.good = 0
        self._comm = model_comm
        # 1 element: the number of ranks of the model that have found an overflow
        self._bad = np.zeros(1)

    @quiet
    def judge(self, gradients: np.ndarray) -> bool:
        """Divide this rank's summed gradients by the scale, in place, and adapt the scale.

        Collective over the ranks of a model. Returns False on all of them if any gradient of the model overflowed; the
        caller must then skip the update.
        """
        np.multiply(gradients, gradients.dtype.type(1 / self.scale), out=gradients)
        # One pass over the array: the dot product is infinite or NaN if any element is.
        self._bad[0] = not np.isfinite(np.dot(gradients, gradients))
        collectives.allreduce(self._bad, self._comm)
        if self._bad[0]:
            self.scale, self.good = max(self.scale / 2, LEAST_SCALE), 0
            return False
        self.good += 1
        if self.good >= GROWTH:
            self.scale, self.good = min(self.scale * 2, MOST_SCALE), 0
        return True
