"""Measure a profile on the job's own ranks: seconds of the layers' compute, and costs of messages.

Messages are measured as the job sends them: one after another, up to one for each layer of the model, and the next
message is already in flight when one ends. In an iteration, some messages travel during the compute, and the
communication thread polls them now and then. Other messages travel while the training thread waits and polls them
itself, which is faster. So half of the measurements are made while the training thread sleeps, and half while it waits.
The result is the mean of both.

A measurement (by `collectives.benchmark.harness.measure`) times a run: the messages of a list of groups, from the start
of the first message to the end of the last. The costs of one message follow from runs of different numbers and sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.benchmark.harness import measure
from mpips.collectives.simulator.cost import LinkCost, fit
from mpips.overlap.messages import Hook, LayeredModel, StoreMessages
from mpips.overlap.problem import PARAMETER_BYTES, Groups, LinearNetwork, Profile, bandwidth, create_profile
from mpips.overlap.timeline import COMPUTE, Task
from mpips.store.runtime.rendezvous import attempt

if TYPE_CHECKING:
    from mpips.store.api import KVStore
    from mpips.store.runtime.engine import Handle

POLL_SECONDS = 5e-4
# number of times that every run of messages is measured
ROUNDS = 3
# the shorter runs have 1 / SHARE of the layers
SHARE = 3
# smallest cost of a push in seconds; if less was measured, this is used
SHORTEST = 1e-6

# the costs of a push, and the costs of a pull
Costs = tuple[LinkCost, LinkCost]


def job_profile(model: LayeredModel, kv: KVStore, x: np.ndarray, y: np.ndarray, costs: Costs | None = None) -> Profile:
    """Measure the profile of this job: the times of its layers on a batch, and the costs of its messages.

    Collective over the workers, blocking. No message may be in flight. The store must have its optimizer already,
    because the optimizer changes what messages cost. Gradients are overwritten; parameters and optimizer state stay.

    Args:
        model: The model, a `LayeredModel`.
        kv: The store.
        x: Inputs of a batch.
        y: Targets of the batch.
        costs: The costs of messages if they are known already. Default: they are measured.

    Raises:
        ValueError: On every worker, if the model fails on this batch on any worker.
    """
    clocked, refusal = attempt(lambda: layer_seconds(model, x, y))
    kv.worker.agree("profile", refusal=refusal)
    assert clocked is not None
    forward, backward = clocked
    push, (startup, per_byte) = job_costs(model, kv) if costs is None else costs
    names = [f"layer{number}" for number in range(1, len(model.layer_elements) + 1)]
    network = LinearNetwork(*push, kv.num_workers, "servers" if kv.layout.num_servers else "allreduce")
    return create_profile(names, model.layer_elements, forward, backward, network, startup, bandwidth(per_byte))


def job_costs(model: LayeredModel, kv: KVStore) -> Costs:
    """Measure what pushes and pulls cost, with temporary keys of the model's sizes.

    Collective over the workers, blocking.
    """
    assert kv.layout.workers is not None
    scratch = np.zeros_like(model.flat_gradients), np.zeros_like(model.flat_gradients)
    return message_costs(StoreMessages(kv, *scratch, model.layer_elements, "measured"), kv.layout.workers, ROUNDS)


# ---- layers


class Stopwatch:
    """Measures one step: when the model reached each layer, and when it continued after the hook.

    The time in a hook itself (waiting for parameters, starting a message) does not count as the layer's time.
    """

    def __init__(self, layers: int) -> None:
        # when each hook was called: row 0 before forward, row 1 after backward
        self._came = np.zeros((2, layers))
        # when each hook returned
        self._went = np.zeros((2, layers))

    def step(self, model: LayeredModel, x: np.ndarray, y: np.ndarray, before: Hook, ready: Hook) -> float:
        """Call the model's `loss_and_gradients` with these hooks, and record the times."""
        return model.loss_and_gradients(x, y, self._around(0, before), self._around(1, ready))

    def seconds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (forward, backward) seconds of every layer in the last step.

        The loss counts as part of the last layer. The moment when forward ends and backward begins in the last layer
        cannot be seen from outside. So a third of this layer's time counts as forward.
        """
        begins, ends = self._spans()
        forward, backward = ends - begins
        return forward, backward

    def tasks(self) -> list[Task]:
        """Return the tasks in the order of the step, with times of time.perf_counter()."""
        begins, ends = (moments.tolist() for moments in self._spans())
        layers = range(len(begins[0]))
        up = [Task("forward", i + 1, i + 1, begins[0][i], ends[0][i], COMPUTE) for i in layers]
        return up + [Task("backward", i + 1, i + 1, begins[1][i], ends[1][i], COMPUTE) for i in reversed(layers)]

    @property
    def waited(self) -> float:
        """The seconds spent in the hooks `before`, which wait for parameters."""
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
    """Return (forward, backward) seconds of every layer on a batch, as medians. Only gradients are written."""
    watch = Stopwatch(len(model.layer_elements))
    seconds = []
    for _ in range(repeats):
        watch.step(model, x, y, lambda layer: None, lambda layer: None)
        seconds.append(watch.seconds())
    forward, backward = np.median(seconds, axis=0)
    return forward.tolist(), backward.tolist()


# ---- messages


def message_costs(
    messages: StoreMessages, workers: MPI.Comm, rounds: int = 5, modes: Sequence[bool] = (True, False)
) -> Costs:
    """Return the costs of a push and of a pull when this job sends its messages in a row.

    A push counts as ended when the next pull can begin, because the servers have the pushes of all workers. Without
    servers both costs are the cost of the allreduce. Collective, blocking. The temporary keys are removed again.

    Args:
        workers, rounds, modes: See `run_seconds`.
    """
    elements = messages.elements

    def pull_all(groups: Groups) -> list[Handle]:
        return [messages.pull(*group) for group in groups]

    def push_all(groups: Groups) -> list[Handle]:
        """Push the groups in the order of the backward pass. Then pull the last one, which waits for the servers."""
        sent = [messages.push(*group) for group in reversed(groups)]
        return sent if messages.one_way else [*sent, messages.pull(*groups[0])]

    wanted = runs(elements)
    messages.sample(dict.fromkeys(group for groups in wanted for group in groups))
    pull = LinkCost(0.0, 0.0)
    if not messages.one_way:
        pull = costs_of_runs(elements, wanted, run_seconds(pull_all, wanted, workers, rounds, modes))
    times = run_seconds(push_all, wanted, workers, rounds, modes)
    if not messages.one_way:
        behind = [pull.alpha + pull.beta * group_bytes(elements, groups[:1]) for groups in wanted]
        times = [max(both - back, SHORTEST) for both, back in zip(times, behind, strict=True)]
    push = costs_of_runs(elements, wanted, times)
    messages.forget()
    return push, push if messages.one_way else pull


def runs(elements: Sequence[int]) -> tuple[Groups, ...]:
    """Return the runs to measure. A run is a list of groups whose messages are sent in a row.

    The first runs send all layers: one by one, in a few groups, and in one group. The last two runs send a third of the
    layers: one by one, and in one group.
    """
    layers = len(elements)
    few = max(1, layers // SHARE)
    singles = tuple((layer, layer) for layer in range(1, layers + 1))
    groups = tuple((first, min(first + few - 1, layers)) for first in range(1, layers + 1, few))
    return tuple(dict.fromkeys((singles, groups, ((1, layers),), singles[:few], ((1, few),))))


def run_seconds(
    start: Callable[[Groups], Sequence[Handle]],
    wanted: Sequence[Groups],
    workers: MPI.Comm,
    rounds: int = 5,
    modes: Sequence[bool] = (True, False),
) -> list[float]:
    """Return the slowest worker's seconds for each run. Collective, blocking.

    The seconds are medians over the rounds of a mode, and then means over the modes.

    Args:
        start: Starts the messages of a run in order and returns their handles. The run ends when all of them have
            ended.
        workers: The workers, all of which start the messages.
        rounds: Number of times that every run is measured in each mode.
        modes: In mode True the training thread sleeps during the messages. In mode False it waits for the messages.
    """

    def run(groups: Groups, asleep: bool) -> None:
        messages = start(groups)
        while asleep and not all(message.done for message in messages):
            time.sleep(POLL_SECONDS)
        for message in messages:
            message.wait()

    calls = [partial(run, groups, asleep) for asleep in modes for groups in wanted]
    timings = measure(workers, calls, 0.0, rounds, load=False)
    medians = np.reshape([timing.median for timing in timings], (len(modes), len(wanted)))
    return medians.mean(axis=0).tolist()


def costs_of_runs(elements: Sequence[int], wanted: Sequence[Groups], times: Sequence[float]) -> LinkCost:
    """Fit the costs of a message to the seconds of runs: MG-WFBP's Eq. 9, and iBatch's Eq. 1 and 2."""
    sizes = [group_bytes(elements, groups) / len(groups) for groups in wanted]
    seconds = [time / len(groups) for time, groups in zip(times, wanted, strict=True)]
    if len(set(sizes)) == 1:
        # With one layer all messages have the same size, so the costs of startup and bytes cannot be separated.
        return LinkCost(float(np.median(seconds)), 0.0)
    return fit(list(zip(sizes, seconds)))


def group_bytes(elements: Sequence[int], groups: Groups) -> float:
    """Return the bytes of all layers in these groups."""
    return float(PARAMETER_BYTES * sum(sum(elements[first - 1 : last]) for first, last in groups))
