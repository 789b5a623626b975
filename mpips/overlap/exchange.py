"""Exchange gradients during the compute: `Overlapped`, the Trainer's exchange with `overlap=`, and its report.

`Execution` runs a plan: a group of layers is pushed when its gradients are complete, and the next forward pass computes
a layer once its parameters have come back. A strategy decides which layers make a group, from a profile that is
measured on the first batch; `auto` takes the optimum. Every `review_every` steps all workers check together whether the
plan still fits, and take another plan if it saves enough time. A report uses only the times that this worker has
measured, and sends nothing.

All strategies give the same results as training without overlap, before and after a change of plan. If the store is
synchronous, the results are equal bit for bit. This has two reasons. An iteration uses the parameters that all
gradients of the iteration before have updated. And a store adds the workers' gradients in an order that does not depend
on how keys are cut.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpips.overlap import planner, timeline
from mpips.overlap.measure import Costs, Stopwatch, job_costs, job_profile
from mpips.overlap.messages import LayeredModel, StoreMessages, check_model
from mpips.overlap.problem import Group, Groups, JointPlan, LinearNetwork, Profile, create_profile, from_ends, shown
from mpips.overlap.strategies import STRATEGIES
from mpips.overlap.timeline import COMPUTE, RECEIVE, SEND, Kind, Task
from mpips.store.runtime.rendezvous import attempt

if TYPE_CHECKING:
    from mpips.optimizers import Optimizer
    from mpips.store.api import KVStore
    from mpips.store.runtime.engine import Handle

# number of last iterations whose times are kept
STEPS = 16
# strategies that need no profile
FIXED = ("single", "layerwise")
# the values of `Trainer(overlap=...)`
CHOICES = ("auto", *STRATEGIES)
REVIEW = 50
# After each review that changes nothing, the time to the next review doubles, up to LONGEST * `review_every` steps.
LONGEST = 64


class SentPush(NamedTuple):
    """A push, from its start until the servers have read its values."""

    push: Handle
    taken: Handle

    @property
    def started(self) -> float:
        return self.push.started

    @property
    def ended(self) -> float:
        return self.taken.ended

    @property
    def done(self) -> bool:
        return self.taken.done

    def wait(self) -> None:
        """Wait until the push has ended and the servers have read its values."""
        self.push.wait()
        self.taken.wait()


class EndedMessage(NamedTuple):
    """A message that was sent by a blocking call, with the attributes of a handle."""

    started: float
    ended: float
    done: bool = True


Messages = Iterable[tuple[Kind, int, int, "Handle | SentPush | EndedMessage"]]


class Execution:
    """Sends the messages of one plan, iteration after iteration.

    A group is pushed as soon as the gradients of its first layer are complete, because backward computes this layer
    last. Early groups are pulled right after their push. The other groups are pulled in layer order after the last
    push.

    Args:
        wait: Called to wait for a message. Default: the message's own wait().
    """

    def __init__(
        self, messages: StoreMessages, plan: JointPlan, wait: Callable[[Handle | SentPush], object] | None = None
    ) -> None:
        self._wait: Callable[[Handle | SentPush], object] = wait or (lambda message: message.wait())
        self._messages = messages
        self.plan = plan
        self.one_way = messages.one_way
        # first layer of a push group -> its last layer
        self._last_of = dict(plan.push)
        early = plan.push[len(plan.push) - plan.early :]
        # layer -> the group whose pull brings its parameters
        self._comes_with = {layer: group for group in plan.pull + early for layer in range(group[0], group[1] + 1)}
        # group -> its push, if the servers may not have read its values yet
        self._pushes: dict[Group, Handle | SentPush] = {}
        # group -> the message that brings its parameters
        self._awaited: dict[Group, Handle | SentPush] = {}
        # messages of this iteration
        self.sent: list[tuple[Kind, int, int, Handle | SentPush | EndedMessage]] = []

    def begin(self) -> None:
        """Begin an iteration. First wait until the servers have read every push of the iteration before. Blocking."""
        for message in self._pushes.values():
            self._wait(message)
        self._pushes.clear()
        self.sent.clear()

    def ready(self, layer: int) -> None:
        """Send the groups that are complete now that layer `layer` has its gradients.

        From now on the layer's parameters may be overwritten.
        """
        last = self._last_of.get(layer)
        if last is not None:
            pushed = self._messages.push(layer, last)
            message = pushed if self.one_way else SentPush(pushed, self._messages.taken(layer, last, pushed))
            self.sent.append(("push", layer, last, message))
            if self.one_way:
                self._awaited[layer, last] = message
            else:
                self._pushes[layer, last] = message
                if layer >= self.plan.first_early_layer:
                    self._awaited[layer, last] = self._pull(layer, last, early=True)
        if layer == 1:
            for group in self.plan.pull:
                self._awaited[group] = self._pull(*group)

    def before(self, layer: int) -> None:
        """Wait for the parameters of `layer`. Blocking. Raises the error that made its messages fail."""
        message = self._awaited.pop(self._comes_with[layer], None)
        if message is not None:
            self._wait(message)

    def finish(self) -> None:
        """Wait for all messages in flight. Blocking."""
        for under_way in (self._awaited, self._pushes):
            while under_way:
                self._wait(under_way.pop(next(iter(under_way))))

    def _pull(self, first: int, last: int, early: bool = False) -> Handle:
        message = self._messages.pull(first, last, early)
        self.sent.append(("pull", first, last, message))
        return message


def sent_tasks(sent: Messages, begin: float = 0.0) -> Iterator[Task]:
    """Yield ended messages as tasks, in seconds from `begin`.

    A message may be started while the message before it is still in flight, or a pull before the servers have received
    its push. Such a message first only waits, so its task begins at the end of the message for which it waits.
    """
    before: dict[Kind, float] = {"push": 0.0, "pull": 0.0}
    pushed: dict[Group, float] = {}
    for kind, first, last, message in sent:
        waited = max(before[kind], pushed.get((first, last), 0.0) if kind == "pull" else 0.0)
        start = min(max(message.started, waited), message.ended)
        before[kind] = max(before[kind], message.ended)
        if kind == "push":
            pushed[first, last] = message.ended
        yield Task(kind, first, last, start - begin, message.ended - begin, SEND if kind == "push" else RECEIVE)


@dataclass(frozen=True)
class OverlapReport:
    """The time of an iteration on this worker, as medians over the last iterations. `print` shows it in words.

    Attributes:
        strategy: The name of the strategy.
        push: Groups of layers that are pushed together, (first, last) from 1.
        pull: Groups of layers that are pulled together after the last push.
        early: How many of the last push groups are pulled right after their push.
        iterations: The number of iterations over which the medians are taken.
        measured_s: Seconds of an iteration.
        predicted_s: Seconds of an iteration predicted from the job's profile, or None if there is no profile.
        hidden: The share of the messages' time during which this worker computed.
        predicted_hidden: The share `hidden` as predicted from the profile, or None if there is no profile.
        tasks: Compute and messages of the last complete iteration, in seconds from its start.
    """

    strategy: str
    push: Groups
    pull: Groups
    early: int
    iterations: int
    measured_s: float
    predicted_s: float | None
    hidden: float
    predicted_hidden: float | None
    tasks: tuple[Task, ...]

    def __str__(self) -> str:
        predicted = "not predicted, since nothing was measured for it"
        if self.predicted_s is not None:
            predicted = f"predicted {self.predicted_s:.4g} s with {self.predicted_hidden:.0%} hidden"
        pulls = f", pulled as {_format_groups(self.pull)}{f', the last {self.early} early' if self.early else ''}"
        return (
            f"overlap {self.strategy}: {self.measured_s:.4g} s an iteration (median of {self.iterations}), "
            f"{self.hidden:.0%} of the communication hidden; {predicted}; pushed as {_format_groups(self.push)}"
            f"{pulls if self.pull else ''}"
        )

    def row(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        return {
            "strategy": self.strategy,
            "push": self.push,
            "pull": self.pull,
            "early": self.early,
            "iterations": self.iterations,
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
            "hidden": self.hidden,
            "predicted_hidden": self.predicted_hidden,
        }

    def save_trace(self, path: str | Path) -> None:
        """Write the last iteration as a Chrome trace, for chrome://tracing or Perfetto."""
        timeline.save_chrome({f"overlap {self.strategy}": self.tasks}, path)

    def save_picture(self, path: str | Path) -> None:
        """Draw the last iteration as a PNG. Needs matplotlib (extra `plot`)."""
        timeline.draw({f"overlap {self.strategy}": self.tasks}, path, str(self).split(";")[0])


class StepClocks(NamedTuple):
    """The measured times of one step: compute tasks and messages, in seconds of time.perf_counter()."""

    seconds: float
    compute: tuple[Task, ...]
    messages: tuple[tuple[Kind, int, int, Handle | SentPush | EndedMessage], ...]


class Recorder:
    """Keeps the measured times of the last steps of a worker."""

    def __init__(self) -> None:
        self._steps: deque[StepClocks] = deque(maxlen=STEPS + 1)

    def step(self, seconds: float, compute: list[Task], messages: Messages) -> None:
        """Record a step. Messages are (kind, first, last, handle), and may still be in flight."""
        self._steps.append(StepClocks(seconds, tuple(compute), tuple(messages)))

    def blocking(self, arrays: int, begin: float, computed: float, exchanged: float) -> None:
        """Record a step without overlap: compute until `computed`, then the exchange of all arrays."""
        compute = Task("compute", 1, arrays, begin, computed, COMPUTE)
        self.step(exchanged - begin, [compute], [("push", 1, arrays, EndedMessage(computed, exchanged))])

    def waited(self, seconds: float) -> None:
        """Add seconds of waiting to the last step."""
        if self._steps:
            last = self._steps.pop()
            self._steps.append(last._replace(seconds=last.seconds + seconds))

    def report(
        self, strategy: str, push: Groups, pull: Groups, early: int, predicted: list[Task] | None
    ) -> OverlapReport:
        """Return the report. Raises RuntimeError if no step has been recorded whose messages have all ended."""
        whole = [tasks for tasks in map(self._tasks, range(len(self._steps))) if tasks]
        if not whole:
            raise RuntimeError("a report needs a step that has ended: call step or fit first")
        return OverlapReport(
            strategy,
            push,
            pull,
            early,
            len(whole),
            float(np.median([step.seconds for step in self._steps])),
            None if predicted is None else timeline.end(predicted),
            float(np.median([timeline.hidden_share(tasks) for tasks in whole])),
            None if predicted is None else timeline.hidden_share(predicted),
            tuple(whole[-1]),
        )

    def _tasks(self, index: int) -> list[Task]:
        """Return the tasks of an iteration, in seconds from its start. The list is empty while a message is in flight.

        The tasks are the iteration's compute, its messages, and the compute of the next step during these messages.
        """
        step = self._steps[index]
        if not all(handle.done for *_, handle in step.messages):
            return []
        messages = list(sent_tasks(step.messages))
        end = max(task.end for task in (*step.compute, *messages))
        behind = [task for later in list(self._steps)[index + 1 : index + 2] for task in later.compute]
        begin = step.compute[0].start
        return [
            task._replace(start=task.start - begin, end=task.end - begin)
            for task in (*step.compute, *messages, *(task for task in behind if task.start < end))
        ]


def _format_groups(groups: Groups) -> str:
    """Format groups for the report: their number, and the first four groups."""
    few = " ".join(map(shown, groups[:4]))
    return f"{len(groups)} group{'s' if len(groups) > 1 else ''} ({few}{' ..' if len(groups) > 4 else ''})"


class Overlapped:
    """The exchange of `mpips.Trainer` with `overlap=`. The first step makes the plan and its keys.

    All workers make the first step together. While this step measures messages, the servers need additional memory of
    up to 3.4 times the model.

    Creating an `Overlapped` is collective. All workers raise ValueError for an unknown strategy, a model without
    layers, or arguments that differ.

    Args:
        strategy: "auto", or the name of a strategy of `mpips plan`.
        review_every: Steps between two reviews of a plan that was made from measurements. Equal on all workers.
    """

    def __init__(
        self,
        model: LayeredModel,
        kv: KVStore,
        optimizer: Optimizer,
        strategy: str = "auto",
        review_every: int = REVIEW,
    ) -> None:
        items, refusal = attempt(lambda: _arguments(model, strategy, review_every))
        kv.worker.agree("overlap", items or [], refusal, noun="argument")
        self._model = model
        self._kv = kv
        self._optimizer = optimizer
        self.strategy = strategy
        self._elements = list(model.layer_elements)
        self._messages = StoreMessages(kv, model.flat_gradients, model.flat_parameters, self._elements)
        self._link = None if self._messages.one_way else self._messages.link
        self._execution: Execution | None = None
        self._watch = Stopwatch(len(self._elements))
        self._recorder = Recorder()
        # for each step since the last review, the seconds of forward and backward of each layer, and of waiting;
        # (2 L + 1,) for L layers
        self._clocked: list[np.ndarray] = []
        # seconds that this worker has waited for messages outside of the hooks of a step
        self._waited = 0.0
        self._interval = review_every
        self._shortest = review_every
        # the last measured profile, for strategies that need one
        self.profile: Profile | None = None
        # the profile from the last call of `measure`
        self._known: Profile | None = None
        # all plans until now; the last plan is in use
        self.plans: list[JointPlan] = []

    @property
    def plan(self) -> JointPlan:
        """The plan in use. It does not exist before the first step."""
        return self.plans[-1]

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Run one iteration and return the batch's loss.

        The new parameters are complete after `finish`. The next step waits for them by itself.
        """
        if self._execution is None:
            self._prepare(x, y)
        elif self.profile is not None and len(self._clocked) >= self._interval:
            self._review()
        execution = self._execution
        assert execution is not None
        begin = time.perf_counter()
        execution.begin()
        self._waited += time.perf_counter() - begin
        loss = self._watch.step(
            self._model, x, y, lambda layer: execution.before(layer + 1), lambda layer: execution.ready(layer + 1)
        )
        self._recorder.step(time.perf_counter() - begin, self._watch.tasks(), execution.sent)
        if self.profile is not None:
            self._clocked.append(np.append(np.concatenate(self._watch.seconds()), self._waited + self._watch.waited))
        self._waited = 0.0
        return loss

    def finish(self) -> None:
        """Wait until the parameters of the last step have arrived. Blocking."""
        if self._execution is not None:
            begin = time.perf_counter()
            self._execution.finish()
            self._waited += time.perf_counter() - begin
            self._recorder.waited(time.perf_counter() - begin)

    def measure(self, x: np.ndarray, y: np.ndarray) -> Profile:
        """Return the profile of the job, measured now on a batch.

        Collective, blocking. The call first waits for messages in flight.
        """
        self.finish()
        if self._execution is None:
            self._kv.set_optimizer(self._optimizer)
        self._known = job_profile(self._model, self._kv, x, y, self._costs())
        return self._known

    def report(self) -> OverlapReport:
        """Return the times of the last steps on this worker. Local."""
        profile, predicted = self.profile or self._known, None
        if not self.plans:
            raise RuntimeError("a report needs a step that has ended: call step or fit first")
        if profile is not None:
            predicted = planner.iteration(profile, self.plan, self._link)
        pull = () if self._link is None else self.plan.pull
        early = 0 if self._link is None else self.plan.early
        return self._recorder.report(self.strategy, self.plan.push, pull, early, predicted)

    # ---- plans

    def _prepare(self, x: np.ndarray, y: np.ndarray) -> None:
        # Set the optimizer before messages are measured, because it changes what they cost.
        self._kv.set_optimizer(self._optimizer)
        # These strategies depend only on the number of layers, so the profile may have costs of 0.
        if self.strategy in FIXED:
            names, nothing = [str(number) for number in range(len(self._elements))], [0.0] * len(self._elements)
            problem = create_profile(names, self._elements, nothing, nothing, LinearNetwork(0.0, 0.0), 0.0, 1.0)
        else:
            problem = self.profile = job_profile(self._model, self._kv, x, y, self._costs())
        self._take(planner.to_execute(problem, self.strategy, self._link))
        for group in self.plan.push:
            self._messages.pull(*group).wait()

    def _review(self) -> None:
        """Check whether the plan still fits, on all workers at the same step. First wait for messages in flight."""
        assert self.profile is not None
        self.finish()
        row = np.median(self._clocked, axis=0)
        # Below, the largest value of all workers is taken. Waiting is negated, because here the smallest value is
        # wanted: the slowest worker waits least.
        row[-1] *= -1
        slowest = np.max(self._gather("a look at the plan", row), axis=0)
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
        """Switch to rank 0's plan. Return True if this plan differs from the plan in use."""
        layers = len(self._elements)
        # The array holds the last layers of the push groups, the last layers of the pull groups, and `early`. Unused
        # places are 0.
        encoded = np.zeros(2 * layers + 1, np.int64)
        encoded[: len(wanted.push)] = [last for _, last in wanted.push]
        encoded[layers : layers + len(wanted.pull)] = [last for _, last in wanted.pull]
        encoded[-1] = wanted.early
        *ends, early = self._from_rank_0(encoded)
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

    def _from_rank_0(self, values: Sequence[int] | np.ndarray) -> list[int]:
        return self._gather("a plan from rank 0", np.array(values, np.int64))[0].tolist()

    def _gather(self, what: str, own: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of all workers, by rank. All arrays have the same length and dtype.

        They are gathered by the store's own rendezvous, so that a waiting worker learns of a death or an error on
        another rank.
        """
        everybody = self._kv.worker.agree(f"overlap: {what}", data=own.tobytes())
        return [np.frombuffer(data, own.dtype) for data in everybody]


def _arguments(model: LayeredModel, strategy: str, review_every: int) -> list[tuple[str, str]]:
    """Return the arguments that must be equal on all workers, by name. Raises ValueError for a wrong one."""
    if strategy not in CHOICES:
        raise ValueError(f"overlap={strategy!r} is unknown; choose one of {', '.join(CHOICES)}")
    check_model(model, f"overlap={strategy!r}")
    if review_every < 1:
        raise ValueError(f"review_every={review_every}: give a number of steps, at least 1")
    layers = model.layer_elements
    return [
        ("overlap", repr(strategy)),
        ("review_every", str(review_every)),
        ("dtype of flat_parameters", str(model.flat_parameters.dtype)),
        ("number of layers", str(len(layers))),
        *((f"layer_elements[{at}]", str(count)) for at, count in enumerate(layers)),
    ]
