"""Overlap communication with compute: plan which layers share a message, and train by the plan (MG-WFBP, iBatch).

    profile = mpips.overlap.load_profile("job.json")          # Trainer.profile measures one
    best = mpips.overlap.plan(profile, "optimal")             # groups (buckets), predicted seconds, timeline
    trainer = mpips.Trainer(model, kv, "sgd", overlap="auto") # measures, plans and executes

The modules `problem`, `strategies`, `joint`, `planner` and `timeline` only compute. `measure`, `messages` and
`exchange` run on the ranks of a job. Names of `measure` and `exchange` are imported when they are first used, so that
planning needs no MPI.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpips.overlap.messages import Hook, LayeredModel, check_model, lay_out
from mpips.overlap.networks import MODELS
from mpips.overlap.planner import OverlapPlan, plan, plans
from mpips.overlap.problem import (
    TEN_GIGABIT,
    JointPlan,
    Layer,
    LinearNetwork,
    Problem,
    Profile,
    RingNetwork,
    create_profile,
    load_profile,
    makespan,
    profile_from_dict,
    profile_to_dict,
    save_profile,
)
from mpips.overlap.strategies import PARTITIONS, STRATEGIES
from mpips.overlap.timeline import Task, draw, hidden_share, save_chrome

if TYPE_CHECKING:
    from mpips.overlap.exchange import Overlapped, OverlapReport
    from mpips.overlap.measure import job_profile

__all__ = [
    "MODELS",
    "PARTITIONS",
    "STRATEGIES",
    "TEN_GIGABIT",
    "Hook",
    "JointPlan",
    "Layer",
    "LayeredModel",
    "LinearNetwork",
    "Overlapped",
    "OverlapPlan",
    "Problem",
    "Profile",
    "OverlapReport",
    "RingNetwork",
    "Task",
    "check_model",
    "create_profile",
    "draw",
    "hidden_share",
    "job_profile",
    "lay_out",
    "load_profile",
    "makespan",
    "plan",
    "plans",
    "profile_from_dict",
    "profile_to_dict",
    "save_chrome",
    "save_profile",
]


def __getattr__(name: str) -> Any:
    if name == "job_profile":
        from mpips.overlap.measure import job_profile

        return job_profile
    if name in ("Overlapped", "OverlapReport"):
        from mpips.overlap import exchange

        return getattr(exchange, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
