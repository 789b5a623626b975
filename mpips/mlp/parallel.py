"""The exchanges of a step: sums of gradients between batch ranks, gathers and sums between model ranks.

Source: the paper, section 5, Algorithm 1 (data parallelism), and section 6, Algorithm 2 (tensor parallelism, which it
calls model parallelism).

Gradients are summed in buckets of whole layers, from the last layer to the first. With overlap, the sum of a bucket is
started as soon as the gradient of its lowest layer is complete, and runs during the rest of the backward pass. Without
overlap, buckets are summed one by one after the backward pass. Both give the same numbers, bit for bit.

With `half`, arrays travel as float16: the array is rounded into a copy, the copy is summed or gathered, and every rank,
the sender too, takes the result from the copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import numpy as np
from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives import plan
from mpips.collectives.kernels.quiet import quiet
from mpips.mlp.network import Network, interval
from mpips.optimizers.base import Optimizer, State
from mpips.optimizers.equation import prepare

# layers are put into a bucket until it has this size
BUCKET_BYTES = 256 << 10
# the loss scale of mixed precision: at the start, and its limits
START_SCALE, LEAST_SCALE, MOST_SCALE = 2.0**10, 1.0, 2.0**24
# consecutive updates without overflow after which the loss scale doubles
GROWTH = 2000
# forward: gathers and sums of the forward pass; backward: sums of gradients; data: reading and distributing rows
PHASES = ("compute", "forward", "backward", "data", "evaluate")


# ---- seconds


class Clock:
    """The seconds that a rank has spent in each of the `PHASES`.

    A phase of communication counts the time that computation waited for it, which includes waiting for slower ranks.
    """

    def __init__(self) -> None:
        self.reset()
        # messages under way, and when the first of them left
        self._messages = 0
        self._since = 0.0

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        # seconds with at least one message under way, whether computation waited for it or not
        self.under_way = 0.0

    def sent(self) -> None:
        """Note that a message has left."""
        if not self._messages:
            self._since = perf_counter()
        self._messages += 1

    def arrived(self) -> None:
        """Note that a message has arrived."""
        self._messages -= 1
        if not self._messages:
            self.under_way += perf_counter() - self._since

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Add the duration of the block to `phase`. The block sends a message and waits for it."""
        start = perf_counter()
        self.sent()
        yield
        self.arrived()
        self.add(phase, start)

    def add(self, phase: str, since: float) -> None:
        """Add the time since `since`, a perf_counter(), to `phase`."""
        self.seconds[phase] += perf_counter() - since

    def communication(self) -> float:
        """Return the seconds that computation has waited for communication until now."""
        return self.seconds["forward"] + self.seconds["backward"]


def hidden_share(waited: float, under_way: float) -> float | None:
    """Return the share of communication time that was hidden behind computation, or None if nothing was sent.

    Args:
        waited: Seconds that computation waited for messages.
        under_way: Seconds with messages under way.
    """
    return max(0.0, 1 - waited / under_way) if under_way else None


# ---- arrays in host memory or on a GPU


def on_host(array: np.ndarray) -> np.ndarray:
    """Return the array itself, or a copy in host memory if it is on a GPU."""
    return array if isinstance(array, np.ndarray) else array.get()


def put(source: np.ndarray, target: np.ndarray) -> None:
    """Copy `source`, in host memory, to `target`, in host memory or on a GPU."""
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.set(np.ascontiguousarray(source, target.dtype))


def _round(array: np.ndarray, copy: np.ndarray) -> None:
    """Write copy = array, rounded to the dtype of the copy. Numbers too large for float16 become infinite."""
    with np.errstate(over="ignore"):
        copy[...] = on_host(array)


# ---- messages of one array each


class Sum:
    """An allreduce of one array over `comm`, in place, that can be run any number of times.

    Run it blocking by `run`, or by `start`, `test` and `wait`. Making one is collective. On one node, an array made by
    `collectives.empty` is summed where it lies, without messages. If the array is empty or there is one
    rank, no call does anything.

    Args:
        half: Send float16.
        phase: The phase to which `clock` adds the time waited.
    """

    def __init__(
        self, array: np.ndarray, comm: MPI.Comm, half: bool = False, phase: str = "backward", clock: Clock | None = None
    ) -> None:
        self._plan = None
        self._array = array
        # the float16 copy that is sent
        self._half = None
        self._phase = phase
        self._clock = clock or Clock()
        self._under_way = False
        if array.size and comm.size > 1:
            self._half = collectives.empty(array.shape, np.float16, comm) if half else None
            self._plan = plan("allreduce", array if self._half is None else self._half, comm)

    def start(self) -> None:
        """Start the sum without waiting for it."""
        if self._plan:
            begin = perf_counter()
            if self._half is not None:
                _round(self._array, self._half)
            self._plan.start()
            self._under_way = True
            self._clock.sent()
            self._clock.add(self._phase, begin)

    def test(self) -> bool:
        """Progress the sum without waiting. Return True if it is done, or was not started."""
        if self._plan and self._under_way and self._plan.test():
            self._under_way = False
            self._clock.arrived()
        return not self._under_way

    def wait(self) -> None:
        """Wait until the array holds the sum."""
        if self._plan:
            begin = perf_counter()
            self._plan.wait()
            if self._half is not None:
                put(self._half, self._array)
            if self._under_way:
                self._under_way = False
                self._clock.arrived()
            self._clock.add(self._phase, begin)

    def run(self) -> None:
        if self._plan:
            with self._clock.waiting(self._phase):
                if self._half is not None:
                    _round(self._array, self._half)
                self._plan()
                if self._half is not None:
                    put(self._half, self._array)

    def free(self) -> None:
        if self._plan:
            self._plan.free()


class Gather:
    """An allgather of one (rows, columns) array, in place. Each rank has its `interval` of the rows.

    If the number of rows is a multiple of the ranks, `collectives` gathers it; if not, MPI does, because `collectives`
    gathers equal blocks only. An array on a GPU travels by a copy in host memory.
    """

    def __init__(self, array: np.ndarray, comm: MPI.Comm, half: bool = False) -> None:
        rows, columns = array.shape
        self._comm = comm
        self._plan = None
        self._array = array
        self._own = slice(*interval(rows, comm.size, comm.rank))
        wire = array
        if half or not isinstance(array, np.ndarray):
            wire = collectives.empty(array.shape, np.float16 if half else array.dtype, comm)
        self._copy = None if wire is array else wire
        if rows % comm.size == 0 and array.size:
            self._plan = plan("allgather", wire, comm)
        row = columns * wire.dtype.itemsize
        slices = [interval(rows, comm.size, rank) for rank in range(comm.size)]
        counts, offsets = [(stop - start) * row for start, stop in slices], [start * row for start, _ in slices]
        self._buffer = [wire, counts, offsets, MPI.BYTE]

    def run(self) -> None:
        if self._copy is not None:
            _round(self._array[self._own], self._copy[self._own])
        if self._plan:
            self._plan()
        else:
            self._comm.Allgatherv(MPI.IN_PLACE, self._buffer)
        if self._copy is not None:
            put(self._copy, self._array)


# ---- between model ranks


class TensorExchange:
    """The `ModelExchange` over one model communicator.

    The same arrays are exchanged in every step, so a `Sum` or `Gather` is made for each array at its first exchange,
    and is kept. Arrays are told apart by address and shape. This is safe because the network keeps them alive.
    """

    def __init__(self, comm: MPI.Comm, clock: Clock, half: bool = False) -> None:
        self.parts = comm.size
        self.part = comm.rank
        self._comm = comm
        self._clock = clock
        self._half = half
        # the sum that start_sum() has begun
        self._running: Sum | None = None
        self._sums: dict[tuple[int, tuple[int, ...]], Sum] = {}
        self._gathers: dict[tuple[int, tuple[int, ...]], Gather] = {}

    def gather(self, full: np.ndarray) -> None:
        with self._clock.waiting("forward"):
            key = _identity(full)
            if key not in self._gathers:
                self._gathers[key] = Gather(full, self._comm, self._half)
            self._gathers[key].run()

    def sum(self, array: np.ndarray) -> None:
        self._sum_of(array, "forward").run()

    def start_sum(self, array: np.ndarray) -> None:
        self._running = self._sum_of(array, "backward")
        self._running.start()

    def poll(self) -> None:
        """Progress the sum that has been started, if any."""
        if self._running is not None:
            self._running.test()

    def wait(self) -> None:
        assert self._running is not None
        self._running.wait()
        self._running = None

    def _sum_of(self, array: np.ndarray, phase: str) -> Sum:
        key = _identity(array)
        if key not in self._sums:
            self._sums[key] = Sum(array, self._comm, self._half, phase, self._clock)
        return self._sums[key]


def _identity(array: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """Return the address and shape of an array, in host memory or on a GPU."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0]), array.shape


# ---- between batch ranks


class LocalUpdate:
    """Sums gradients over the batch ranks and runs the optimizer on every rank (Algorithms 1 and 3).

    Weights are updated bucket by bucket, as the sums arrive. With a loss scale they are updated at once in the end,
    because an overflow in any bucket rejects the whole update.

    Args:
        comm: The batch communicator.
        overlap: Sum buckets during the backward pass.
        half: Send float16.
        scale: The loss scale of mixed precision.
    """

    def __init__(
        self,
        network: Network,
        comm: MPI.Comm,
        optimizer: Optimizer,
        clock: Clock,
        overlap: bool,
        half: bool = False,
        scale: LossScale | None = None,
    ) -> None:
        self._network = network
        self._optimizer = optimizer
        self._overlap = overlap
        self.loss_scale = scale
        self._state = optimizer.init(network.flat_parameters)
        prepare(optimizer, network.flat_parameters.dtype)
        # layer whose gradient completes a bucket -> (slice of the flat arrays, its sum)
        self._buckets = {
            layer: (slice(start, stop), Sum(network.flat_gradients[start:stop], comm, half, "backward", clock))
            for layer, start, stop in buckets(network.layer_elements, 2 if half else network.dtype.itemsize)
        }
        self._started: list[Sum] = []

    def gradient(self, layer: int) -> None:
        """Start the sum of the bucket that this layer's gradients complete, if they complete one."""
        if self._overlap and layer in self._buckets:
            _, sum_ = self._buckets[layer]
            sum_.start()
            self._started.append(sum_)

    def poll(self) -> None:
        """Progress the sums that have been started."""
        while self._started and self._started[0].test():
            del self._started[0]

    def divisor(self, samples: int) -> float:
        """Return the number by which to divide this rank's sum of gradients, in a minibatch of `samples` samples."""
        return samples if self.loss_scale is None else samples / self.loss_scale.scale

    def run(self, step: int) -> None:
        """Sum the gradients over the batch ranks, or wait for the sums, and update the weights. Collective, blocking.

        `step` counts from 1.
        """
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
        """Return the optimizer's state, laid out as the flat parameters. It is valid at batch index 0. Collective."""
        return self._state

    def restore(self, state: State, step: int) -> None:
        """Set the optimizer's state, equal on all batch indices, as it was after `step` updates. Collective."""
        for mine, array in zip(self._state, state):
            mine[...] = array


def buckets(elements: Sequence[int], itemsize: int) -> list[tuple[int, int, int]]:
    """Cut the flat gradients into buckets: layers, in the order of the backward pass, of `BUCKET_BYTES` or more.

    Args:
        elements: Number of elements of each layer.

    Returns:
        (layer, start, stop) of each bucket. The bucket is complete when the gradient of `layer`, its lowest, is.
    """
    found = []
    stop = start = sum(elements)
    for layer in range(len(elements) - 1, -1, -1):
        start -= elements[layer]
        if (stop - start) * itemsize >= BUCKET_BYTES or layer == 0:
            found.append((layer, start, stop))
            stop = start
    return found


class LossScale:
    """The loss scale of mixed precision, equal on all ranks of a mesh.

    Gradients are multiplied by the scale before they travel as float16, so that small ones do not become 0. The scale
    adapts: if gradients overflow float16, the update is skipped and the scale halved. After `GROWTH` good updates in a
    row it doubles.

    Ranks with the same slice see the same sums, so they make the same decision. The ranks of one model hold different
    slices, so they sum the number of ranks that saw an overflow.

    Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2.
    """

    def __init__(self, model_comm: MPI.Comm) -> None:
        self.scale = START_SCALE
        # good updates since the scale changed last
        self.good = 0
        # 1 element: the number of ranks of the model that saw an overflow
        self._bad = np.zeros(1)
        self._ask = Sum(self._bad, model_comm)

    @quiet
    def judge(self, gradients: np.ndarray) -> bool:
        """Divide summed gradients by the scale, in place, and adapt the scale.

        Return False if the update must be skipped because gradients overflowed. Collective over the ranks of a model.
        """
        np.multiply(gradients, gradients.dtype.type(1 / self.scale), out=gradients)
        # One pass over the array: the dot product is infinite or NaN if any element is.
        self._bad[0] = not np.isfinite(np.dot(gradients, gradients))
        self._ask.run()
        if self._bad[0]:
            self.scale, self.good = max(self.scale / 2, LEAST_SCALE), 0
            return False
        self.good += 1
        if self.good >= GROWTH:
            self.scale, self.good = min(self.scale * 2, MOST_SCALE), 0
        return True
