"""Training with the exchange beside the compute: `Overlapped`, the Trainer's exchange with `overlap=`.

Groups of layers are pushed when their gradients are there. The next forward pass takes up a layer when its parameters
have come back.

The gradients of a group (a bucket) are one interval of the model's flat array, so nothing is packed (messages.py).
Which layers make a group is a strategy's plan, from what is measured on the first batch: `auto` takes the optimum.
Layers and waits are clocked in every step. Every `review_every` steps all workers look together whether the plan still
fits, and take another where that saves enough (planner.py).

All strategies give the numbers of no overlap, before and after a change of plan, bit for bit where the store is
synchronous. An iteration uses the parameters that all gradients of the last one made. A store adds the workers'
gradients in an order that does not depend on how keys are cut.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpips.store.runtime.rendezvous import attempt

from . import planner
from .layers import LayeredModel, check_model
from .measure import Costs, Stopwatch, job_costs, job_profile
from .messages import Store, StoreMessages
from .problem import JointPlan, from_ends
from .profile import Linear, Profile, create_profile
from .report import Recorder, Report
from .runtime import Execution
from .strategies import STRATEGIES

if TYPE_CHECKING:
    from mpips.optimizers import Optimizer

FIXED = ("sequential", "single", "layerwise")  # they need no profile
CHOICES = ("auto", *STRATEGIES)
"""What `Trainer(overlap=...)` takes."""
REVIEW = 50
LONGEST = 64
"""Reviews that change nothing come half as often, up to so many times `review_every` apart."""


class Overlapped:
    """An exchange for `mpips.Trainer`. Plans and makes its keys in the first step, which all workers take together.

    strategy: "auto" or the name of one in `mpips plan`. review_every: steps between two looks at a measured plan; all
    workers give the same. While messages are measured, up to 3.4 times the model lies more on the servers. Making it is
    collective: ValueError on all workers for another strategy, a model without layers, or arguments that differ.
    """

    def __init__(
        self, model: LayeredModel, kv: Store, optimizer: Optimizer, strategy: str = "auto",
        review_every: int = REVIEW,
    ) -> None:  # fmt: skip
        items, refusal = attempt(lambda: _arguments(model, strategy, review_every))
        kv.settings.agree("overlap", items or [], refusal, noun="argument")
        self._model, self._kv, self._optimizer, self.strategy = model, kv, optimizer, strategy
        self._elements = list(model.layer_elements)
        self._messages = StoreMessages(kv, model.flat_gradients, model.flat_parameters, self._elements)
        self._link = None if self._messages.one_way else self._messages.link
        self._execution: Execution | None = None
        self._watch = Stopwatch(len(self._elements))
        self._recorder = Recorder()
        self._clocked: list[np.ndarray] = []
        """Forward, backward and waiting seconds of steps since the last review, (2 L + 1,) each."""
        self._waited = 0.0
        self._interval, self._shortest = review_every, review_every
        self.profile: Profile | None = None
        """What was measured last, if anything was."""
        self._known: Profile | None = None
        """What `measure` was told to find out."""
        self.plans: list[JointPlan] = []
        """Every plan so far; the last one is in use."""

    @property
    def plan(self) -> JointPlan:
        """The plan in use, once there was a step."""
        return self.plans[-1]

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """One iteration; the batch's loss. The new parameters are there after `finish`; the next step waits itself."""
        if self._execution is None:
            self._prepare(x, y)
        elif self.profile is not None and len(self._clocked) >= self._interval:
            self._review()
        assert self._execution is not None
        begin = time.perf_counter()
        self._execution.begin()
        self._waited += time.perf_counter() - begin
        loss = self._watch.step(self._model, x, y, self._before, self._ready)
        self._recorder.step(time.perf_counter() - begin, self._watch.tasks(), self._execution.sent)
        if self.profile is not None:
            self._clocked.append(np.append(np.concatenate(self._watch.seconds()), self._waited + self._watch.waited))
        self._waited = 0.0
        return loss

    def finish(self) -> None:
        """Wait until the parameters are those of the last step. Blocking."""
        if self._execution is not None:
            begin = time.perf_counter()
            self._execution.finish()
            self._waited += time.perf_counter() - begin
            self._recorder.waited(time.perf_counter() - begin)

    def measure(self, x: np.ndarray, y: np.ndarray) -> Profile:
        """The profile of the job as it is now, on a batch. Collective, blocking; what is under way ends first."""
        self.finish()
        if self._execution is None:
            self._kv.set_optimizer(self._optimizer)
        self._known = job_profile(self._model, self._kv, x, y, self._costs())
        return self._known

    def report(self) -> Report:
        """What the last steps were on this worker. Local."""
        profile, predicted = self.profile or self._known, None
        if not self.plans:
            raise RuntimeError("a report needs a step that has ended: call step or fit first")
        if profile is not None:
            predicted = planner.iteration(profile, self.plan, self._link)
        pull = () if self._link is None else self.plan.pull
        early = 0 if self._link is None else self.plan.early
        return self._recorder.report(self.strategy, self.plan.push, pull, early, predicted)

    def _before(self, layer: int) -> None:
        assert self._execution is not None
        self._execution.before(layer + 1)

    def _ready(self, layer: int) -> None:
        assert self._execution is not None
        self._execution.ready(layer + 1)

    # ---- plans

    def _prepare(self, x: np.ndarray, y: np.ndarray) -> None:
        self._kv.set_optimizer(self._optimizer)  # before messages are measured, which are to cost what they will
        problem = _unknown(self._elements)
        if self.strategy not in FIXED:
            problem = self.profile = job_profile(self._model, self._kv, x, y, self._costs())
        self._take(planner.to_execute(problem, self.strategy, self._link))
        for group in self.plan.push:
            self._messages.pull(*group).wait()

    def _review(self) -> None:
        """Look at the plan again; all workers at the same step. What is under way ends first."""
        assert self.profile is not None
        self.finish()
        row = np.median(self._clocked, axis=0)
        row[-1] *= -1  # the slowest worker waits least
        slowest = np.max(self._told("a look at the plan", row), axis=0)
        forward, backward = np.split(slowest[:-1], 2)
        self.profile = self.profile.with_compute(forward, backward)
        drifted = planner.network_drifted(self.profile, self.plan, self._link, max(0.0, -slowest[-1]))
        if self._from_rank_0([drifted])[0]:
            self.profile = self.profile.with_network(*self._costs(), self._kv.num_workers)
        changed = self._take(planner.better(self.profile, self.plan, self.strategy, self._link))
        longer = min(2 * self._interval, LONGEST * self._shortest)
        self._interval = self._shortest if changed else longer
        self._clocked.clear()

    def _take(self, wanted: JointPlan) -> bool:
        """Go on by rank 0's plan; whether it is another one."""
        layers = len(self._elements)
        words = np.zeros(2 * layers + 1, np.int64)
        words[: len(wanted.push)] = [last for _, last in wanted.push]
        words[layers : layers + len(wanted.pull)] = [last for _, last in wanted.pull]
        words[-1] = wanted.early
        *ends, early = self._from_rank_0(words)
        push, pull = (from_ends(end for end in half if end) for half in (ends[:layers], ends[layers:]))
        plan = JointPlan(push, early, pull)
        if self.plans and plan == self.plan:
            return False
        self._messages.plan(plan)
        self._execution = Execution(self._messages, plan)
        self.plans.append(plan)
        return True

    def _costs(self) -> Costs:
        return job_costs(self._model, self._kv)

    # ---- together

    def _from_rank_0(self, values: Sequence[int] | np.ndarray) -> list[int]:
        return self._told("a plan from rank 0", np.array(values, np.int64))[0].tolist()

    def _told(self, what: str, mine: np.ndarray) -> list[np.ndarray]:
        """Everybody's array of one length and dtype; the store's own meeting, so that nobody waits unheard."""
        told = self._kv.settings.agree(f"overlap: {what}", data=mine.tobytes())
        return [np.frombuffer(data, mine.dtype) for data in told]


def _arguments(model: LayeredModel, strategy: str, review_every: int) -> list[tuple[str, str]]:
    """What must be equal on all workers, by name; ValueError where it is wrong."""
    if strategy not in CHOICES:
        raise ValueError(f"overlap={strategy!r} is unknown; choose one of {', '.join(CHOICES)}")
    check_model(model, f"overlap={strategy!r}")
    if review_every < 1:
        raise ValueError(f"review_every={review_every}: give a number of steps, at least 1")
    layers = model.layer_elements
    return [("overlap", repr(strategy)), ("review_every", str(review_every)),
            ("dtype of flat_parameters", str(model.flat_parameters.dtype)), ("number of layers", str(len(layers))),
            *((f"layer_elements[{at}]", str(count)) for at, count in enumerate(layers))]


def _unknown(elements: Sequence[int]) -> Profile:
    """A profile for strategies that look at nothing but the number of layers."""
    nothing = [0.0] * len(elements)
    names = [str(number) for number in range(len(elements))]
    return create_profile(names, elements, nothing, nothing, Linear(0.0, 0.0), 0.0, 1.0)
