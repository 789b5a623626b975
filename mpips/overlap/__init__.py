"""Overlap of communication with compute: which layers travel together, in plans and in training (MG-WFBP, iBatch).

    profile = mpips.overlap.load_profile("job.json")          # Trainer.profile measures one
    best = mpips.overlap.plan(profile, "optimal")             # groups (buckets), predicted seconds, timeline
    trainer = mpips.Trainer(model, kv, "sgd", overlap="auto") # measures, plans and executes

problem, profile, strategies -> planner, timeline: pure. layers: what a model offers. measure, messages, runtime,
exchange, report: on the ranks of a job. The names are loaded when they are first used, so that planning needs no MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .exchange import Overlapped
    from .layers import Hook, LayeredModel, check_model, lay_out
    from .measure import fit_costs, job_profile
    from .networks import MODELS
    from .planner import Plan, plan, plans
    from .problem import JointPlan, Problem, check_groups, makespan
    from .profile import (
        TEN_GIGABIT,
        Layer,
        Linear,
        Profile,
        Ring,
        create_profile,
        load_profile,
        profile_from_dict,
        profile_to_dict,
        save_profile,
    )
    from .report import Report
    from .strategies import PARTITIONS, STRATEGIES
    from .timeline import Task, hidden_share
    from .trace import draw, save_chrome

_NAMES = {
    "exchange": ["Overlapped"],
    "layers": ["Hook", "LayeredModel", "check_model", "lay_out"],
    "measure": ["fit_costs", "job_profile"],
    "networks": ["MODELS"],
    "planner": ["Plan", "plan", "plans"],
    "problem": ["JointPlan", "Problem", "check_groups", "makespan"],
    "profile": [
        "TEN_GIGABIT", "Layer", "Linear", "Profile", "Ring", "create_profile", "load_profile", "profile_from_dict",
        "profile_to_dict", "save_profile",
    ],
    "report": ["Report"],
    "strategies": ["PARTITIONS", "STRATEGIES"],
    "timeline": ["Task", "hidden_share"],
    "trace": ["draw", "save_chrome"],
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
