"""Measure a profile on the job's own ranks: seconds of the layers' compute, and costs of messages.

Messages cost what they cost in the job: sent in a row, the next one under way when the last one ends, on as many layers
as there are. In an iteration some of them go on beside compute, looked at by the communication thread now and then.
Others go on while the training thread waits and looks itself, which is faster. So half of the measurements are made
while it sleeps, half while it waits, and the mean counts. What is measured is a run, a list of groups, and its seconds
from the first start to the last end. The costs of one message follow from runs of different numbers and sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.simulator.cost import LinkCost, fit
from mpips.overlap.messages import Hook, LayeredModel, StoreMessages
from mpips.overlap.problem import PARAMETER_BYTES, Groups, Linear, Profile, bandwidth, create_profile
from mpips.overlap.timeline import COMPUTE, Task
from mpips.store.runtime.rendezvous import attempt

if TYPE_CHECKING:
    from mpips.store.api import KVStore
    from mpips.store.runtime.engine import Handle

POLL_SECONDS = 5e-4
REPEATS = 3  # of every run of messages
SHARE = 3  # part of the layers that shorter runs have
SHORTEST = 1e-6
"""Seconds that a push takes at least, whatever the clocks say."""

Costs = tuple[LinkCost, LinkCost]
"""Of a push and of a pull."""


def job_profile(model: LayeredModel, kv: KVStore, x: np.ndarray, y: np.ndarray, costs: Costs | None = None) -> Profile:
    """Return the layers clocked on a batch, and what messages cost (`costs`: as known already).

    Collective over the workers, blocking, with nothing under way. The store has its optimizer, so that messages cost
    what they will. Gradients are overwritten; parameters and state stay.
    """
    clocked, refusal = attempt(lambda: layer_seconds(model, x, y))
    kv.worker.agree("profile", refusal=refusal)
    assert clocked is not None
    forward, backward = clocked
    push, (startup, per_byte) = job_costs(model, kv) if costs is None else costs
    names = [f"layer{number}" for number in range(1, len(model.layer_elements) + 1)]
    network = Linear(*push, kv.num_workers, "servers" if kv.layout.num_servers else "allreduce")
    return create_profile(names, model.layer_elements, forward, backward, network, startup, bandwidth(per_byte))


def job_costs(model: LayeredModel, kv: KVStore) -> Costs:
    """Return what pushes and pulls cost in runs over keys of the model's sizes, which are given up again. Collective
    over the workers, blocking."""
    workers, everybody = kv.layout.workers, np.empty(1)
    assert workers is not None

    def slowest(seconds: float) -> float:
        workers.Allreduce(np.array([seconds]), everybody, op=MPI.MAX)
        return float(everybody[0])

    scratch = np.zeros_like(model.flat_gradients), np.zeros_like(model.flat_gradients)
    return message_costs(StoreMessages(kv, *scratch, model.layer_elements, "measured"), slowest, REPEATS)


# ---- layers


class Stopwatch:
    """One step: when the model came to each layer, and when it went on after the hook.

    What a hook itself takes (a wait for parameters, the start of a message) is not the layer's.
    """

    def __init__(self, layers: int) -> None:
        self._came = np.zeros((2, layers))
        self._went = np.zeros((2, layers))

    def step(self, model: LayeredModel, x: np.ndarray, y: np.ndarray, before: Hook, ready: Hook) -> float:
        """Call `loss_and_gradients` with these hooks, clocked."""
        return model.loss_and_gradients(x, y, self._around(0, before), self._around(1, ready))

    def seconds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (forward, backward) of every layer in the last step; the loss counts to the last layer's.

        The turn at the last layer is not seen from outside: a third of it counts as forward.
        """
        begins, ends = self._spans()
        forward, backward = ends - begins
        return forward, backward

    def tasks(self) -> list[Task]:
        """Return the tasks in the order of the step, by time.perf_counter()."""
        begins, ends = (moments.tolist() for moments in self._spans())
        layers = range(len(begins[0]))
        up = [Task("forward", i + 1, i + 1, begins[0][i], ends[0][i], COMPUTE) for i in layers]
        return up + [Task("backward", i + 1, i + 1, begins[1][i], ends[1][i], COMPUTE) for i in reversed(layers)]

    @property
    def waited(self) -> float:
        """Return the seconds spent in the hooks before layers: waits for parameters."""
        return float((self._went[0] - self._came[0]).sum())

    def _spans(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return when the compute of each layer began and when it ended, (2, layers) each: forward, backward."""
        (came_f, came_b), (went_f, went_b) = self._came, self._went
        turn = went_f[-1] + (came_b[-1] - went_f[-1]) / 3
        return np.stack([went_f, np.append(went_b[1:], turn)]), np.stack([np.append(came_f[1:], turn), came_b])

    def _around(self, kind: int, hook: Hook) -> Hook:
        came, went = self._came[kind], self._went[kind]

        def clocked(layer: int) -> None:
            came[layer] = time.perf_counter()
            hook(layer)
            went[layer] = time.perf_counter()

        return clocked


def layer_seconds(
    model: LayeredModel, x: np.ndarray, y: np.ndarray, repeats: int = 3
) -> tuple[list[float], list[float]]:
    """Return (forward, backward) seconds of every layer on a batch, medians. Only gradients are written."""
    watch = Stopwatch(len(model.layer_elements))
    found = []
    for _ in range(repeats):
        watch.step(model, x, y, lambda layer: None, lambda layer: None)
        found.append(watch.seconds())
    forward, backward = np.median(found, axis=0)
    return forward.tolist(), backward.tolist()


# ---- messages


def message_costs(
    messages: StoreMessages, slowest: Callable[[float], float], repeats: int = 5, modes: Sequence[bool] = (True, False)
) -> Costs:
    """Return the costs of a push and of a pull, as this job's messages cost in a row.

    What a push takes ends when the pull behind it can begin: when the servers have everybody's. Without servers both
    are the allreduce's. `slowest`, `repeats`, `modes`: see `run_seconds`. Collective, blocking; the keys for it are
    given up again.
    """
    elements = messages.elements

    def pull_all(groups: Groups) -> list[Handle]:
        return [messages.pull(*group) for group in groups]

    def push_all(groups: Groups) -> list[Handle]:
        """Push as backward does, and wait for the servers by pulling what was pushed last."""
        sent = [messages.push(*group) for group in reversed(groups)]
        return sent if messages.one_way else [*sent, messages.pull(*groups[0])]

    wanted = runs(elements)
    messages.sample(dict.fromkeys(group for groups in wanted for group in groups))
    pull = LinkCost(0.0, 0.0)
    if not messages.one_way:
        pull = costs_of_runs(elements, wanted, run_seconds(pull_all, wanted, slowest, repeats, modes))
    times = run_seconds(push_all, wanted, slowest, repeats, modes)
    if not messages.one_way:
        behind = [pull.alpha + pull.beta * group_bytes(elements, groups[:1]) for groups in wanted]
        times = [max(both - back, SHORTEST) for both, back in zip(times, behind, strict=True)]
    push = costs_of_runs(elements, wanted, times)
    messages.forget()
    return push, push if messages.one_way else pull


def runs(elements: Sequence[int]) -> tuple[Groups, ...]:
    """Return what is sent: all layers one by one, in a few groups and in one. Then a third of them one by one and in
    one."""
    layers = len(elements)
    few = max(1, layers // SHARE)
    singles = tuple((layer, layer) for layer in range(1, layers + 1))
    groups = tuple((first, min(first + few - 1, layers)) for first in range(1, layers + 1, few))
    return tuple(dict.fromkeys((singles, groups, ((1, layers),), singles[:few], ((1, few),))))


def run_seconds(
    start: Callable[[Groups], Sequence[Handle]],
    wanted: Sequence[Groups],
    slowest: Callable[[float], float],
    repeats: int = 5,
    modes: Sequence[bool] = (True, False),
) -> list[float]:
    """Return the slowest worker's seconds for each run: medians over `repeats` of each mode, and their mean.

    In a mode the training thread is asleep (True) or waits. `start` starts the messages of a run in order; it has ended
    when all of them have. `slowest(seconds)` is the largest of all workers', and brings them together. Collective,
    blocking.
    """
    times = np.empty((repeats + 1, len(modes), len(wanted)))
    for repeat, mode, index in np.ndindex(times.shape):  # the first repeat warms up
        slowest(0.0)
        begin = time.perf_counter()
        messages = start(wanted[index])
        while modes[mode] and not all(message.done for message in messages):
            time.sleep(POLL_SECONDS)
        for message in messages:
            message.wait()
        times[repeat, mode, index] = slowest(time.perf_counter() - begin)
    return np.median(times[1:], axis=0).mean(axis=0).tolist()


def costs_of_runs(elements: Sequence[int], wanted: Sequence[Groups], times: Sequence[float]) -> LinkCost:
    """Return the costs of a message, from the seconds of runs: MG-WFBP's Eq. 9, and iBatch's Eq. 1 and 2."""
    sizes = [group_bytes(elements, groups) / len(groups) for groups in wanted]
    seconds = [time / len(groups) for time, groups in zip(times, wanted, strict=True)]
    if len(set(sizes)) == 1:
        return LinkCost(float(np.median(seconds)), 0.0)  # one layer: nothing to divide
    return fit(list(zip(sizes, seconds)))


def group_bytes(elements: Sequence[int], groups: Groups) -> float:
    """Return the bytes of the layers of some groups."""
    return float(PARAMETER_BYTES * sum(sum(elements[first - 1 : last]) for first, last in groups))
