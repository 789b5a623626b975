"""The partition problem behind MG-WFBP and iBatch: which layers of one direction of an iteration travel together.

Both papers overlap a chain of layer computations with messages, one per contiguous group of layers. A group is what
PyTorch calls a bucket:

* push (MG-WFBP, section II.C): backward computes layers L..1; a group is sent once its lowest layer is done and the
  network is free (Eq. 6, 7, 20);
* pull (iBatch, "Problem Formulation"): groups arrive in the order 1..L, one after the other; a layer is computed once
  its group is there and the layer before it is done.

A layer computes c seconds, and a message of layers i..j takes `startup + sum(transfer[i..j])`. Unrolling the two
recurrences gives one and the same longest path. For groups g_1, .., g_K in layer order,

    makespan = max over k of  comm(g_1) + .. + comm(g_k)  +  compute(g_k) + .. + compute(g_K).

Pull reads it from left to right, push from right to left in reversed time. Hence every strategy for one direction is a
strategy for the other, and one exact planner serves both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Group = tuple[int, int]
"""Layers (first, last) that travel together, both inclusive, counted from 1."""
Groups = tuple[Group, ...]
"""Contiguous groups that cover the layers 1..L, in layer order."""


Link = Literal["shared", "duplex"]
"""Whether pushes and pulls share one link, or have one each."""


class JointPlan(NamedTuple):
    """The groups of both directions (strategies/joint.py).

    push: groups of layers 1..L. early: how many of the last are pulled right behind their push. pull: groups of the
    layers below.
    """

    push: Groups
    early: int
    pull: Groups

    @property
    def first_early_layer(self) -> int:
        """Layers from this one on are pulled early; L + 1 if none is."""
        return self.push[-self.early][0] if self.early else self.push[-1][1] + 1


class Problem(NamedTuple):
    """Seconds of one direction, layers in forward order. `of` makes it from any sequences, and checks them.

    compute: float64 (L,), backward (push) or forward (pull) time of each layer.
    startup: seconds every message costs (MG-WFBP's a, iBatch's T_s).
    transfer: float64 (L,), further seconds for the layer's bytes (MG-WFBP's b M, iBatch's T_t).
    """

    compute: NDArray[np.float64]
    startup: float
    transfer: NDArray[np.float64]

    @classmethod
    def of(cls, compute: ArrayLike, startup: float, transfer: ArrayLike) -> Problem:
        """A problem from two sequences of equal, positive length; ValueError otherwise."""
        c, t = np.asarray(compute, np.float64), np.asarray(transfer, np.float64)
        if c.ndim != 1 or c.shape != t.shape or not len(c):
            raise ValueError(
                f"compute has shape {c.shape}, transfer {t.shape}: give two lists of one length, at least 1"
            )
        return cls(c, float(startup), t)

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.compute)


def sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Prefix sums with a leading zero: layers i..j (1-based) add up to `sums[j] - sums[i - 1]`."""
    return np.concatenate(([0.0], np.cumsum(values)))


def check_groups(groups: Iterable[Group], layers: int) -> Groups:
    """The groups as tuples; ValueError unless they are contiguous, in order, and cover 1..layers."""
    found = tuple((int(first), int(last)) for first, last in groups)
    expected = 1
    for first, last in found:
        if first != expected or last < first:
            raise ValueError(f"group [{first}, {last}] should start at layer {expected}: groups cover 1..{layers}")
        expected = last + 1
    if expected != layers + 1:
        raise ValueError(f"groups end at layer {expected - 1}, the profile at layer {layers}")
    return found


def from_ends(ends: Iterable[int]) -> Groups:
    """Groups from the last layer of each, ascending (iBatch's l_1, .., l_N)."""
    groups, first = [], 1
    for last in ends:
        groups.append((first, last))
        first = last + 1
    return tuple(groups)


def shown(group: Group) -> str:
    """A group in words: "3", or "3-5"."""
    first, last = group
    return str(first) if first == last else f"{first}-{last}"


def message_times(problem: Problem, groups: Groups) -> NDArray[np.float64]:
    """Seconds on the network of every group, in layer order."""
    total = sums(problem.transfer)
    return np.array([problem.startup + total[last] - total[first - 1] for first, last in groups])


def makespan(problem: Problem, groups: Groups) -> float:
    """Seconds from the first task's start to the last one's end, of push and of pull alike (module docstring)."""
    compute = sums(problem.compute)
    begun = np.array([compute[first - 1] for first, _ in groups])
    return float(np.max(np.cumsum(message_times(problem, groups)) + compute[-1] - begun))

