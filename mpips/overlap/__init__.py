"""Overlap of communication with compute: which layers travel together, in plans and in training (MG-WFBP, iBatch).

    profile = mpips.overlap.load_profile("job.json")          # Trainer.profile measures one
    best = mpips.overlap.plan(profile, "optimal")             # groups (buckets), predicted seconds, timeline
    trainer = mpips.Trainer(model, kv, "sgd", overlap="auto") # measures, plans and executes

`problem`, `strategies`, `planner` and `timeline` are pure. `measure`, `messages` and `exchange` run on ranks of a job.
The names are loaded when they are first used, so that planning needs no MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpips.overlap.exchange import Overlapped, Report
    from mpips.overlap.measure import fit_costs, job_profile
    from mpips.overlap.messages import Hook, LayeredModel, check_model, lay_out
    from mpips.overlap.networks import MODELS
    from mpips.overlap.planner import Plan, plan, plans
    from mpips.overlap.problem import (
        TEN_GIGABIT,
        JointPlan,
        Layer,
        Linear,
        Problem,
        Profile,
        Ring,
        check_groups,
        create_profile,
        load_profile,
        makespan,
        profile_from_dict,
        profile_to_dict,
        save_profile,
    )
    from mpips.overlap.strategies import PARTITIONS, STRATEGIES
    from mpips.overlap.timeline import Task, draw, hidden_share, save_chrome

_NAMES = {
    "exchange": ["Overlapped", "Report"],
    "measure": ["fit_costs", "job_profile"],
    "messages": ["Hook", "LayeredModel", "check_model", "lay_out"],
    "networks": ["MODELS"],
    "planner": ["Plan", "plan", "plans"],
    "problem": [
        "TEN_GIGABIT", "JointPlan", "Layer", "Linear", "Problem", "Profile", "Ring", "check_groups", "create_profile",
        "load_profile", "makespan", "profile_from_dict", "profile_to_dict", "save_profile",
    ],
    "strategies": ["PARTITIONS", "STRATEGIES"],
    "timeline": ["Task", "draw", "hidden_share", "save_chrome"],
}  # fmt: skip
_HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "MODELS", "PARTITIONS", "STRATEGIES", "TEN_GIGABIT", "Hook", "JointPlan", "Layer", "LayeredModel", "Linear",
    "Overlapped", "Plan", "Problem", "Profile", "Report", "Ring", "Task", "check_groups", "check_model",
    "create_profile", "draw", "fit_costs", "hidden_share", "job_profile", "lay_out", "load_profile", "makespan", "plan",
    "plans", "profile_from_dict", "profile_to_dict", "save_chrome", "save_profile",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
