"""What measured times become: costs of messages, the layers' times; and the runs that are measured."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives.benchmark import harness
from mpips.overlap import measure
from mpips.overlap.measure import Stopwatch
from mpips.overlap.problem import Groups

from .problems import check_cover


@pytest.mark.parametrize("elements", [[5], [3, 1, 2], list(range(1, 50))])
def test_runs_reach_from_a_message_a_layer_to_one(elements: list[int]) -> None:
    runs = measure.runs(elements)
    whole = [groups for groups in runs if groups[-1][1] == len(elements)]
    assert len(set(runs)) == len(runs)
    assert {len(elements), 1} <= {len(groups) for groups in whole}
    for groups in runs:
        check_cover(groups, groups[-1][1])


class Time:
    """A clock that only sleep moves, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


time = Time()


@pytest.fixture(autouse=True)
def _virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (measure, harness):
        monkeypatch.setattr(module, "time", time)


class Message:
    """Under way until so many seconds after its start."""

    def __init__(self, seconds: float) -> None:
        self.started = time.perf_counter()
        self.ended = self.started + seconds

    @property
    def done(self) -> bool:
        return time.perf_counter() >= self.ended

    def wait(self) -> None:
        while not self.done:
            time.sleep(1e-4)


def test_costs_of_a_link_from_its_runs() -> None:
    elements, startup, per_byte = [500] * 12, 2e-3, 1e-6

    def start(groups: Groups) -> list[Message]:
        return [Message(startup * len(groups) + per_byte * measure.group_bytes(elements, groups))]

    wanted = measure.runs(elements)
    times = measure.run_seconds(start, wanted, MPI.COMM_SELF, rounds=3)
    found = measure.costs_of_runs(elements, wanted, times)
    assert found == pytest.approx((startup, per_byte), rel=0.05)


def test_one_layer_is_all_startup() -> None:
    assert measure.costs_of_runs([7], measure.runs([7]), [0.25]) == (0.25, 0.0)


class Sleeper:
    """A model whose layers only take time."""

    layer_elements = [4, 4, 4]  # noqa: RUF012
    flat_parameters = flat_gradients = np.zeros(12, np.float32)

    def loss_and_gradients(self, x: np.ndarray, y: np.ndarray, before: Any = None, ready: Any = None) -> float:
        for layer, seconds in enumerate((0.002, 0.02, 0.002)):
            before(layer)
            time.sleep(seconds)
        for layer, seconds in reversed(list(enumerate((0.002, 0.02, 0.004)))):
            time.sleep(seconds)
            ready(layer)
        return 0.0


def test_each_layer_gets_its_own_time() -> None:
    forward, backward = measure.layer_seconds(Sleeper(), np.zeros(1), np.zeros(1))
    assert forward == pytest.approx([0.002, 0.02, 0.002])
    assert backward == pytest.approx([0.002, 0.02, 0.004])


def test_hooks_do_not_count_as_compute() -> None:
    """A wait for parameters before a layer, or the start of a message behind it, is not the layer's time."""
    watch = Stopwatch(3)
    watch.step(Sleeper(), np.zeros(1), np.zeros(1), lambda layer: time.sleep(0.03), lambda layer: time.sleep(0.03))
    forward, backward = watch.seconds()
    assert forward[0] + backward[0] == pytest.approx(0.004)
    assert watch.waited == pytest.approx(3 * 0.03)


def test_clocks_become_tasks_in_the_order_of_a_step() -> None:
    watch = Stopwatch(3)
    watch.step(Sleeper(), np.zeros(1), np.zeros(1), lambda layer: time.sleep(0.5), lambda layer: time.sleep(0.25))
    tasks = watch.tasks()
    order = [*(("forward", layer) for layer in (1, 2, 3)), *(("backward", layer) for layer in (3, 2, 1))]
    assert [(task.kind, task.first) for task in tasks] == order
    gaps = [after.start - before.end for before, after in pairwise(tasks)]
    assert gaps == pytest.approx([0.5, 0.5, 0.0, 0.25, 0.25])
    forward, backward = watch.seconds()
    assert [task.seconds for task in tasks] == pytest.approx([*forward, *backward[::-1]])
