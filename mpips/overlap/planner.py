"""Plan which layers share a message, from measured times and a strategy, and check whether the plan still fits.

A plan covers pushes, pulls or both, on any number of nodes. The measured times are a `problem.Profile`. Training with
PyTorch plans in `mpips.torch.buckets`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mpips.overlap import joint, timeline
from mpips.overlap.problem import Groups, JointPlan, Link, Profile
from mpips.overlap.strategies import PARTITIONS, STRATEGIES
from mpips.overlap.timeline import Task

Direction = Literal["push", "pull", "both"]
# share of an iteration that a new plan must save; a smaller gain may be noise
GAIN = 0.05
# Messages are measured again if the time of an iteration differs from its prediction by more than this share.
DRIFT = 0.25


@dataclass(frozen=True)
class OverlapPlan:
    """The groups of a strategy, and the predicted timeline of one iteration with them.

    Attributes:
        direction: "push", "pull" or "both".
        nodes: The number of nodes of the allreduce.
        push: Groups that are pushed together, in layer order, or None if the plan does not cover pushes.
        pull: Groups that are pulled together, in layer order, or None if the plan does not cover pulls.
        early: How many of the last push groups are pulled right after their push, before the groups in `pull`. Only
            `joint` has any.
        tasks: The timeline of one iteration.
        iteration_s: Seconds of the iteration.
        hidden_share: The share of the communication's time during which something is computed.
    """

    strategy: str
    direction: Direction
    nodes: int | None
    push: Groups | None
    pull: Groups | None
    early: int
    tasks: tuple[Task, ...]

    @property
    def groups(self) -> Groups:
        """The groups of layers for pushes or, if the plan has no pushes, for pulls."""
        groups = self.push if self.push is not None else self.pull
        assert groups is not None
        return groups

    @property
    def iteration_s(self) -> float:
        return timeline.end(self.tasks)

    @property
    def hidden_share(self) -> float:
        return timeline.hidden_share(self.tasks)

    def row(self) -> dict[str, Any]:
        """Return the plan as JSON data. The keys are strategy, nodes, iteration_s, groups, direction and hidden_share.

        A plan of both directions also has pull_groups and early.
        """
        row: dict[str, Any] = {
            "strategy": self.strategy,
            "nodes": self.nodes,
            "iteration_s": self.iteration_s,
            "groups": [list(group) for group in self.groups],
            "direction": self.direction,
            "hidden_share": self.hidden_share,
        }
        if self.direction == "both":
            row |= {"pull_groups": [list(group) for group in self.pull or ()], "early": self.early}
        return row


def plan(
    profile: Profile,
    strategy: str,
    direction: Direction = "push",
    nodes: int | None = None,
    link: Link = "shared",
) -> OverlapPlan:
    """Plan by one strategy which layers share a message, and predict an iteration. Local; needs no MPI.

    Args:
        profile: The times of the layers, and the costs of messages.
        strategy: One of `STRATEGIES`.
        direction: The direction to plan. `joint` always covers both.
        nodes: The number of nodes of the allreduce. Default: the number on which the profile was measured.
        link: "shared" if pushes and pulls share the network, "duplex" if not. For direction "both" only.

    Returns:
        The groups of layers, and the predicted timeline.

    Raises:
        ValueError: The strategy is unknown, or the network needs `nodes` and it is None.

    >>> network = mpips.overlap.LinearNetwork(a=0.1, b=1e-3)
    >>> profile = mpips.overlap.create_profile(["a", "b"], [100, 400], [1.0, 2.0], [2.0, 4.0], network, 0.5, 1e3)
    >>> plan = mpips.overlap.plan(profile, "optimal")
    >>> plan.groups, round(plan.iteration_s, 2)
    (((1, 1), (2, 2)), 9.5)
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; known are {', '.join(STRATEGIES)}")
    if nodes is None:
        nodes = getattr(profile.network, "nodes", None)
    if strategy == "joint":
        return _both(profile, strategy, joint.plan(profile.push(nodes), profile.pull(), link), nodes, link)
    partition = PARTITIONS[strategy]
    if direction == "push":
        groups = partition(profile.push(nodes))
        tasks = timeline.push_iteration(profile, groups, nodes)
        return OverlapPlan(strategy, direction, nodes, groups, None, 0, tuple(tasks))
    if direction == "pull":
        groups = partition(profile.pull())
        tasks = timeline.pull_iteration(profile, groups, nodes)
        return OverlapPlan(strategy, direction, nodes, None, groups, 0, tuple(tasks))
    in_order = JointPlan(partition(profile.push(nodes)), 0, partition(profile.pull()))
    return _both(profile, strategy, in_order, nodes, link)


def iteration(profile: Profile, groups: JointPlan, link: Link | None) -> list[Task]:
    """Return the timeline of any plan.

    If `link` is None, pushes bring the parameters back. Otherwise the messages are pushes and pulls of a parameter
    server, over one link ("shared") or two ("duplex").
    """
    if link is None:
        return timeline.push_iteration(profile, groups.push)
    return timeline.both(profile.push(), profile.pull(), groups, link)


def to_execute(profile: Profile, strategy: str, link: Link | None) -> JointPlan:
    """Return the groups of a strategy. "auto" is the best plan. For `link` see `iteration`."""
    if link is None:
        groups = PARTITIONS["optimal" if strategy in ("auto", "joint") else strategy](profile.push())
        # A push also returns the new parameters, so there are no pulls after the pushes: all groups are pulled early.
        return JointPlan(groups, len(groups), ())
    if strategy in ("auto", "joint"):
        return joint.plan(profile.push(), profile.pull(), link)
    partition = PARTITIONS[strategy]
    return JointPlan(partition(profile.push()), 0, partition(profile.pull()))


def predicted_s(profile: Profile, groups: JointPlan, link: Link | None) -> float:
    """Return the predicted seconds of an iteration. For `link` see `iteration`."""
    return timeline.end(iteration(profile, groups, link))


def network_drifted(profile: Profile, groups: JointPlan, link: Link | None, waited_s: float) -> bool:
    """True if the compute of the profile plus `waited_s` seconds of waiting for messages is far from the prediction.

    Then the costs of messages have changed since they were measured.
    """
    predicted = predicted_s(profile, groups, link)
    return abs(profile.forward_s + profile.backward_s + waited_s - predicted) > DRIFT * predicted


def better(profile: Profile, groups: JointPlan, strategy: str, link: Link | None) -> JointPlan:
    """Return the strategy's plan for this profile if it saves enough time, or else the current plan `groups`."""
    other = to_execute(profile, strategy, link)
    saves = predicted_s(profile, other, link) < (1 - GAIN) * predicted_s(profile, groups, link)
    return other if saves else groups


def plans(
    profile: Profile,
    strategies: Iterable[str] = STRATEGIES,
    direction: Direction = "push",
    nodes: Iterable[int | None] = (None,),
    link: Link = "shared",
) -> list[OverlapPlan]:
    """Plan by several strategies for several numbers of nodes, as `plan` does. Return the plans, sorted by nodes first.

    >>> network = mpips.overlap.LinearNetwork(a=0.1, b=1e-3)
    >>> profile = mpips.overlap.create_profile(["a", "b"], [100, 400], [1.0, 2.0], [2.0, 4.0], network, 0.5, 1e3)
    >>> best = min(mpips.overlap.plans(profile), key=lambda plan: plan.iteration_s)
    >>> best.strategy
    'layerwise'
    """
    names = list(strategies)
    return [plan(profile, name, direction, size, link) for size in nodes for name in names]


def _both(profile: Profile, strategy: str, groups: JointPlan, nodes: int | None, link: Link) -> OverlapPlan:
    tasks = timeline.both(profile.push(nodes), profile.pull(), groups, link)
    return OverlapPlan(strategy, "both", nodes, groups.push, groups.pull, groups.early, tuple(tasks))
