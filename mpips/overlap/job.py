"""The profile of a job, measured on its own ranks with its own model and store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpips.runtime.rendezvous import attempt

from . import measure
from .model import LayeredModel
from .profile import Collective, Linear, Profile, create
from .wire import Wire

if TYPE_CHECKING:
    from mpips.store import KVStore

REPEATS = 3  # of every run of messages

Costs = tuple[tuple[float, float], tuple[float, float]]
"""(startup seconds, seconds a byte) of a push and of a pull."""


def profile_of(model: LayeredModel, kv: KVStore, x: np.ndarray, y: np.ndarray, costs: Costs | None = None) -> Profile:
    """Layers clocked on a batch, and what messages cost (`costs`: as known already).

    Collective over the workers, blocking, with nothing under way. The store has its optimizer, so that messages cost
    what they will. Gradients are overwritten; parameters and state stay.
    """
    clocked, refusal = attempt(lambda: measure.compute(model, x, y))
    kv.settings.agree("profile", refusal=refusal)
    assert clocked is not None
    forward, backward = clocked
    push, (startup, per_byte) = message_costs(model, kv) if costs is None else costs
    names = [f"layer{number}" for number in range(1, len(model.layer_elements) + 1)]
    network = Linear(*push, kv.num_workers, collective(kv))
    return create(names, model.layer_elements, forward, backward, network, startup, 1 / max(per_byte, 1e-15))


def collective(kv: KVStore) -> Collective:
    """What a push is."""
    return "servers" if kv.layout.num_servers else "allreduce"


def message_costs(model: LayeredModel, kv: KVStore) -> Costs:
    """What pushes and pulls cost in runs over keys of the model's sizes, which are given up again. Collective over the
    workers, blocking."""
    from mpi4py import MPI

    workers, everybody = kv.layout.workers, np.empty(1)
    assert workers is not None

    def slowest(seconds: float) -> float:
        workers.Allreduce(np.array([seconds]), everybody, op=MPI.MAX)
        return float(everybody[0])

    scratch = np.zeros_like(model.flat_gradients), np.zeros_like(model.flat_gradients)
    return Wire(kv, *scratch, model.layer_elements, "measured").costs(slowest, REPEATS)
