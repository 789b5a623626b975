"""Strategies that group layers into messages, one direction at a time: a pure function for each. `planner` chooses.

`optimal` is the exact optimum, and `merged` is MG-WFBP's rule. `single` and `layerwise` depend only on the number of
layers. `single` is SyncEASGD's single message after the backward pass (MG-WFBP, section I), which is also what
parameter servers do by default. `layerwise` is wait-free backpropagation with a message for each layer (section II.C).
`joint` plans both directions at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpips.overlap.problem import Groups, Problem, from_ends, sums


def single(problem: Problem) -> Groups:
    return ((1, problem.layers),)


def layerwise(problem: Problem) -> Groups:
    return tuple((layer, layer) for layer in range(1, problem.layers + 1))


def merged(problem: Problem) -> Groups:
    """Return the groups of MG-WFBP's Algorithm 1. It merges a layer into the layer below if both then end sooner.

    Where the paper's pseudo-code differs from its equations, the equations are followed:
    * line 9 stops at layer 2, yet lines 13 and 25 read tau_b[1]: the start of every layer's backward is computed here;
    * line 13 reads tau_b[l - 2], which does not exist for l = 2. By the derivation of Eq. 26 that value stands for
      tau_b[l - 1] + tb[l - 1], the moment layer l - 1 is ready. This sum is used for every l (for l > 2 it is equal to
      tau_b[l - 2]);
    * the proof of Theorem 1 twice compares with b where Eq. 26 and 27 say a; a is used.

    Theorem 1 calls the result optimal. It is not: each step compares the two choices for layer l as if layer l - 1 were
    sent by itself, but l - 1 may be merged in turn.

    The cost is O(L). The paper computes all of tau_c again after every merge, which is O(L^2), but a merge changes none
    of the values that were used before it.
    """
    # tau_b + tb of every layer (Eq. 19): the time at which its gradients are ready
    ready = np.cumsum(problem.compute[::-1])[::-1].tolist()
    message = (problem.startup + problem.transfer).tolist()
    # tau_c of the layer (Eq. 20): the time at which its message begins. Merging a layer changes only the tau_c of
    # layers below it.
    begin = ready[-1]
    joined = set()
    # Layers count from 0 here: the paper's l is layer + 1.
    for layer in range(problem.layers - 1, 0, -1):
        # Eq. 27
        if ready[layer - 1] - begin < problem.startup:
            # Eq. 16: T(p + q) = T(p) + T(q) - a, and Eq. 14
            message[layer - 1] += message[layer] - problem.startup
            message[layer] = 0.0
            joined.add(layer)
        begin = max(begin + message[layer], ready[layer - 1])
    # The paper's layer l + 1 has index l here: a group ends at every l whose upper neighbour was not merged into it.
    return from_ends(layer for layer in range(1, problem.layers + 1) if layer not in joined)


def optimal(problem: Problem) -> Groups:
    """Return the groups with the least makespan, by dynamic programming over the group sent last.

    In the terms of a push: layers are ready in the order L..1, layer i at ready[i] = compute[i] + .. + compute[L]. Let
    e[i] be the earliest moment at which all of layers i..L have been sent, with e[L + 1] = 0. Then

        e[i] = min over j >= i of  max(e[j + 1], ready[i]) + startup + transfer[i] + .. + transfer[j],

    and e[1] is the least makespan.

    Proof. Take any partition of i..L. Its last message holds some i..j. The message starts no earlier than ready[i],
    and no earlier than the messages before it end, which is at e[j + 1] at the earliest. So no partition is faster than
    the right side. A partition attains it: send i..j after a partition of j + 1..L that ends at e[j + 1]. Both steps
    use only that a message never ends earlier when the network becomes free later (optimal substructure of a chain). A
    pull has the same makespan for the same groups (problem.py), so the same partition is optimal for it.

    Since e is the earliest end of *every* suffix, a group that is hidden by compute is not merged, although merging it
    might cost nothing. So the plan keeps the most slack. If two choices are equally fast, the longer message is taken,
    which saves a startup. The cost is O(L^2) time and O(L) memory, with the inner minimum in NumPy: about 1 ms for 200
    layers.
    """
    layers = problem.layers
    ready = np.cumsum(problem.compute[::-1])[::-1]
    transfer = sums(problem.transfer)
    # end[i]: the earliest moment at which layers i + 1..L have been sent
    end = np.zeros(layers + 1)
    last = np.zeros(layers, np.int64)
    for i in range(layers - 1, -1, -1):
        ends = np.maximum(end[i + 1 :], ready[i]) + transfer[i + 1 :]
        best = len(ends) - 1 - int(np.argmin(ends[::-1]))
        last[i] = i + 1 + best
        end[i] = ends[best] + problem.startup - transfer[i]
    ends, i = [], 0
    while i < layers:
        i = int(last[i])
        ends.append(i)
    return from_ends(ends)


# name -> function that groups the layers for one direction
PARTITIONS: dict[str, Callable[[Problem], Groups]] = {
    "single": single,
    "layerwise": layerwise,
    "merged": merged,
    "optimal": optimal,
}
# all names, as `mpips plan --strategy` takes them
STRATEGIES = (*PARTITIONS, "joint")
