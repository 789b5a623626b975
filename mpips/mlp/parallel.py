"""Exchange in a step: sums of gradients between batch ranks, activations between model ranks.

Source: the paper, section 5, Algorithm 1 (data parallelism), and section 6, Algorithm 2 (tensor parallelism, which it
calls model parallelism). Gradients are summed in buckets of whole layers, from the last layer to the first. Beside
computation a bucket leaves when its lowest layer's gradient is there; otherwise buckets go one by one after the
backward pass. Both give the same numbers, bit for bit. With `half` arrays travel as float16: the array is rounded into
a copy, the copy is summed or gathered, and everybody, the sender too, takes the result from it.
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

BUCKET_BYTES = 256 << 10
START_SCALE, LEAST_SCALE, MOST_SCALE = 2.0**10, 1.0, 2.0**24
GROWTH = 2000  # good updates, after which the loss scale doubles
PHASES = ("compute", "forward", "backward", "data", "evaluate")


# ---- seconds


class Clock:
    """Seconds of a rank by phase: compute; forward gathers and sums; backward reductions; data (reading and
    distribution); evaluate.

    A phase of communication counts what computation waits for, slower ranks too. `under_way`: seconds with a message on
    its way, whether computation goes on beside it or not.
    """

    def __init__(self) -> None:
        self.reset()
        self._messages = 0
        self._since = 0.0

    def reset(self) -> None:
        """Begin to count anew."""
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.under_way = 0.0

    def sent(self) -> None:
        """Note that a message has left."""
        if not self._messages:
            self._since = perf_counter()
        self._messages += 1

    def arrived(self) -> None:
        """Note that one that left is known to have arrived."""
        self._messages -= 1
        if not self._messages:
            self.under_way += perf_counter() - self._since

    @contextmanager
    def waiting(self, phase: str) -> Iterator[None]:
        """Count the block, which sends a message and waits for it, for `phase`."""
        start = perf_counter()
        self.sent()
        yield
        self.arrived()
        self.add(phase, start)

    def add(self, phase: str, since: float) -> None:
        """Count the time from `since` (perf_counter) to now for `phase`."""
        self.seconds[phase] += perf_counter() - since

    def communication(self) -> float:
        """Return the seconds in which computation waited for communication so far."""
        return self.seconds["forward"] + self.seconds["backward"]


def hidden_share(waited: float, under_way: float) -> float | None:
    """Return the share of the seconds with messages under way that computation did not wait for; None without any."""
    return max(0.0, 1 - waited / under_way) if under_way else None


# ---- arrays of the host, or of a GPU


def on_host(array: np.ndarray) -> np.ndarray:
    """Return the array, or the host's copy of one that a GPU holds."""
    return array if isinstance(array, np.ndarray) else array.get()


def put(source: np.ndarray, target: np.ndarray) -> None:
    """Write target = source, which is on the host, wherever the target is."""
    if isinstance(target, np.ndarray):
        target[...] = source
    else:
        target.set(np.ascontiguousarray(source, target.dtype))


def _round(array: np.ndarray, copy: np.ndarray) -> None:
    """Write copy = array, rounded; numbers that float16 cannot hold become infinite."""
    with np.errstate(over="ignore"):
        copy[...] = on_host(array)


# ---- messages of one array each


class Sum:
    """The in-place sum of one array over `comm`, begun by `start` and finished by `wait`, any number of times.

    Making one is collective. Arrays made by `collectives.empty` are summed where they lie, without messages, by
    ranks of one node. `clock` counts for `phase` what is waited for.
    """

    def __init__(
        self, array: np.ndarray, comm: MPI.Comm, half: bool = False, phase: str = "backward", clock: Clock | None = None
    ) -> None:
        self._plan, self._array, self._half = None, array, None
        self._phase, self._clock, self._under_way = phase, clock or Clock(), False
        if array.size and comm.size > 1:
            self._half = collectives.empty(array.shape, np.float16, comm) if half else None
            self._plan = plan("allreduce", array if self._half is None else self._half, comm)

    def start(self) -> None:
        """Begin, without waiting."""
        if self._plan:
            begin = perf_counter()
            if self._half is not None:
                _round(self._array, self._half)
            self._plan.start()
            self._under_way = True
            self._clock.sent()
            self._clock.add(self._phase, begin)

    def test(self) -> bool:
        """Move on as far as possible without waiting; True where it has arrived, or nothing is under way."""
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
        """Start and wait."""
        if self._plan:
            with self._clock.waiting(self._phase):
                if self._half is not None:
                    _round(self._array, self._half)
                self._plan()
                if self._half is not None:
                    put(self._half, self._array)

    def free(self) -> None:
        """Give back what the sum holds."""
        if self._plan:
            self._plan.free()


class Gather:
    """Every rank's `interval` of the rows of one (rows, columns) array, gathered in place.

    Blocks of whole rows are the blocks that `collectives` cuts where the ranks divide the rows; else MPI gathers them.
    Arrays of a GPU travel by a copy on the host.
    """

    def __init__(self, array: np.ndarray, comm: MPI.Comm, half: bool = False) -> None:
        rows, columns = array.shape
        self._comm, self._plan, self._array = comm, None, array
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
        """Gather; blocking."""
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
    """The exchange of one model communicator. Arrays come again every step, so what moves them is made once each.

    Arrays are told apart by address and shape; the network keeps them alive. With `half` they travel as float16.
    """

    def __init__(self, comm: MPI.Comm, clock: Clock, half: bool = False) -> None:
        self.parts, self.part = comm.size, comm.rank
        self._comm, self._clock, self._half = comm, clock, half
        self._running: Sum | None = None
        self._sums: dict[tuple[int, tuple[int, ...]], Sum] = {}
        self._gathers: dict[tuple[int, tuple[int, ...]], Gather] = {}

    def gather(self, full: np.ndarray) -> None:
        """Fill (neurons, samples) with every rank's slice of rows; blocking."""
        with self._clock.waiting("forward"):
            key = _identity(full)
            if key not in self._gathers:
                self._gathers[key] = Gather(full, self._comm, self._half)
            self._gathers[key].run()

    def sum(self, array: np.ndarray) -> None:
        """Sum a forward array over the ranks; blocking."""
        self._sum_of(array, "forward").run()

    def start_sum(self, array: np.ndarray) -> None:
        """Begin to sum a backward array over the ranks; one at a time."""
        self._running = self._sum_of(array, "backward")
        self._running.start()

    def poll(self) -> None:
        """Move on the sum that has been started."""
        if self._running is not None:
            self._running.test()

    def wait(self) -> None:
        """Finish the sum that has been started."""
        assert self._running is not None
        self._running.wait()
        self._running = None

    def _sum_of(self, array: np.ndarray, phase: str) -> Sum:
        key = _identity(array)
        if key not in self._sums:
            self._sums[key] = Sum(array, self._comm, self._half, phase, self._clock)
        return self._sums[key]


def _identity(array: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """Return address and shape of an array of the host or of a GPU."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0]), array.shape


# ---- between batch ranks


class LocalUpdate:
    """The optimizer runs on every rank, bucket by bucket as the sums arrive (Algorithms 1 and 3)."""

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
        self._network, self._optimizer, self._overlap = network, optimizer, overlap
        self.loss_scale = scale
        """That of mixed precision."""
        self._state = optimizer.init(network.flat_parameters)
        prepare(optimizer, network.flat_parameters.dtype)
        self._buckets = {
            layer: (slice(start, stop), Sum(network.flat_gradients[start:stop], comm, half, "backward", clock))
            for layer, start, stop in buckets(network.layer_elements, 2 if half else network.dtype.itemsize)
        }
        self._started: list[Sum] = []

    def gradient(self, layer: int) -> None:
        """Send the bucket that the gradients of this layer complete; those of all layers above it are there."""
        if self._overlap and layer in self._buckets:
            _, sum_ = self._buckets[layer]
            sum_.start()
            self._started.append(sum_)

    def poll(self) -> None:
        """Move on the sums that have been started."""
        while self._started and self._started[0].test():
            del self._started[0]

    def divisor(self, samples: int) -> float:
        """Return the number that this rank's sum of gradients is divided by in a minibatch of `samples` samples."""
        return samples if self.loss_scale is None else samples / self.loss_scale.scale

    def run(self, step: int) -> None:
        """Take each bucket as its gradients become their sum over the batch ranks, and update its weights.

        `step` counts from 1. Collective, blocking.
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
        """Return the optimizer's state, laid out as the flat parameters; valid at batch index 0. Collective."""
        return self._state

    def restore(self, state: State, step: int) -> None:
        """Go on from such a state, the same on all batch indices, after `step` updates. Collective."""
        for mine, array in zip(self._state, state):
            mine[...] = array


def buckets(elements: Sequence[int], itemsize: int) -> list[tuple[int, int, int]]:
    """Return (layer, start, stop) of each bucket of the flat gradients, complete with the gradient of `layer`.

    Layers, in the order of the backward pass, are put together until a bucket has `BUCKET_BYTES`; `elements` by layer.
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
    """The loss scale of mixed precision, the same on all ranks of a mesh: gradients travel as float16 multiplied by it,
    so that small ones do not vanish.

    Source: Micikevicius et al., "Mixed precision training" (2018), section 3.2. The scale is chosen as training goes:
    an update whose gradients overflowed float16 is left out and the scale halved; after `GROWTH` good updates it
    doubles. Ranks of one slice see the same sums; the ranks of a model ask each other.
    """

    def __init__(self, model_comm: MPI.Comm) -> None:
        self.scale, self.good = START_SCALE, 0
        self._bad = np.zeros(1)
        self._ask = Sum(self._bad, model_comm)

    @quiet
    def judge(self, gradients: np.ndarray) -> bool:
        """Take the scale out of summed gradients, in place, and adapt it; False where this update must be left out.
        Collective over the ranks of a model."""
        np.multiply(gradients, gradients.dtype.type(1 / self.scale), out=gradients)
        self._bad[0] = not np.isfinite(np.dot(gradients, gradients))
        self._ask.run()
        if self._bad[0]:
            self.scale, self.good = max(self.scale / 2, LEAST_SCALE), 0
            return False
        self.good += 1
        if self.good >= GROWTH:
            self.scale, self.good = min(self.scale * 2, MOST_SCALE), 0
        return True
