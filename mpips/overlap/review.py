"""Whether a plan still fits the job: layers measured again in training, and what follows from it. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from . import timeline
from .planner import iteration, to_execute
from .profile import Linear, Profile
from .strategies.joint import JointPlan, Link

GAIN = 0.05
"""Share of an iteration that another plan must save, so that noise changes nothing."""
DRIFT = 0.25
"""Share by which an iteration may miss its prediction before messages are measured again."""


def with_compute(profile: Profile, forward_s: NDArray[np.float64], backward_s: NDArray[np.float64]) -> Profile:
    """The profile with other times of its layers, (L,) each."""
    times = zip(profile.layers, forward_s.tolist(), backward_s.tolist(), strict=True)
    return replace(profile, layers=tuple(replace(layer, forward_s=f, backward_s=b) for layer, f, b in times))


def with_network(profile: Profile, push: tuple[float, float], pull: tuple[float, float], nodes: int) -> Profile:
    """The profile with other costs (startup, seconds a byte) of messages."""
    assert isinstance(profile.network, Linear)
    network = Linear(*push, nodes, profile.network.collective)
    return replace(profile, network=network, startup_s=pull[0], bandwidth_Bps=1 / max(pull[1], 1e-15))


def seconds(profile: Profile, plan: JointPlan, link: Link | None) -> float:
    """Predicted seconds of an iteration."""
    return timeline.end(iteration(profile, plan, link))


def network_drifted(profile: Profile, plan: JointPlan, link: Link | None, waited_s: float) -> bool:
    """Whether an iteration of this compute and so many seconds of waiting for messages is far from the prediction."""
    predicted = seconds(profile, plan, link)
    return abs(profile.forward_s + profile.backward_s + waited_s - predicted) > DRIFT * predicted


def better(profile: Profile, plan: JointPlan, strategy: str, link: Link | None) -> JointPlan:
    """The strategy's plan for this profile if that is worth a change, else the plan that there is."""
    found = to_execute(profile, strategy, link)
    gains = seconds(profile, found, link) < (1 - GAIN) * seconds(profile, plan, link)
    return found if gains else plan
