"""Plans executed on ranks: what is pushed and pulled when, through a store and by other messages."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpips.overlap import JointPlan
from mpips.overlap import exchange as runtime
from mpips.overlap.messages import StoreMessages
from mpips.store.runtime.engine import Engine
from tests.mpi.mpips.overlap.support import WORLD, all_ranks, worker
from tests.unit.mpips.runtime.fake import FakeGeneration

CUTS = (
    JointPlan(((1, 2), (3, 5)), 0, ((1, 1), (2, 4), (5, 5))),
    JointPlan(((1, 3), (4, 5)), 1, ((1, 3),)),
    JointPlan(((1, 5),), 0, ((1, 3), (4, 5))),
)


def _keep(seen: list[np.ndarray], values: np.ndarray, layer: int) -> None:
    """What a layer finds."""
    seen.append(values.copy())


def test_pushes_and_pulls_cut_differently() -> None:
    """A plan whose pull groups are not its push groups, then another one: the sums are right, and state is kept."""
    options = {"servers": 1}
    kv, ok = worker("dist_sync", options), True
    if kv is not None:
        elements = [4, 3, 2, 5, 1]
        gradients, parameters = np.arange(15.0), np.zeros(15)
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        messages = StoreMessages(kv, gradients, parameters, elements)
        expected, velocity = np.zeros(15), np.zeros(15)
        for plan in CUTS:
            messages.plan(plan)
            execution = runtime.Execution(messages, plan)
            for _ in range(2):
                arrived: list[np.ndarray] = []
                take = partial(_keep, arrived, parameters)
                tasks = runtime.iteration(execution, len(elements), take, lambda layer: None)
                velocity = 0.5 * velocity - kv.num_workers * gradients
                expected = expected + velocity
                stops = np.cumsum(elements)
                ok &= all(np.allclose(got[:stop], expected[:stop]) for got, stop in zip(arrived, stops))
                pulled = {(task.first, task.last) for task in tasks if task.kind == "pull"}
                ok &= pulled == {*plan.pull, *plan.push[len(plan.push) - plan.early :]}
        kv.close()
    assert all_ranks(ok)


class Reducer:
    """Messages of a plan as allreduces of its own."""

    one_way = True

    def __init__(self, engine: Engine, comm: MPI.Comm, gradients: np.ndarray, totals: np.ndarray) -> None:
        self._engine, self._comm, self._gradients, self._totals = engine, comm, gradients, totals

    def push(self, first: int, last: int) -> Any:
        def work() -> Any:
            where = slice(first - 1, last)
            request = self._comm.Iallreduce(self._gradients[where], self._totals[where])
            while not request.Test():
                yield

        return self._engine.submit(["comm"], work(), 0, "allreduce")

    def taken(self, first: int, last: int, push: Any) -> Any:
        raise NotImplementedError

    def pull(self, first: int, last: int, early: bool = False) -> Any:
        raise NotImplementedError


def test_clocked_iterations_of_a_plan() -> None:
    """The tasks of a measured iteration respect the plan, and the sums are right."""
    engine = Engine(FakeGeneration(20, 40))  # type: ignore[arg-type]
    comm = WORLD.Dup()
    gradients, totals = np.zeros(6), np.zeros(6)
    groups = ((1, 2), (3, 6))

    def backward(layer: int) -> None:
        gradients[layer - 1] = layer

    execution = runtime.Execution(Reducer(engine, comm, gradients, totals), JointPlan(groups, 2, ()))
    tasks = runtime.iteration(execution, 6, lambda layer: None, backward)
    engine.close()
    comm.Free()
    ends = {(t.kind, t.first): t.end for t in tasks if t.kind == "backward"}
    starts = {(t.first, t.last): t.start for t in tasks if t.kind == "push"}
    ok = set(starts) == set(groups) and all(starts[group] >= ends["backward", group[0]] for group in groups)
    assert all_ranks(ok and np.array_equal(totals, WORLD.size * np.arange(1.0, 7.0)))
