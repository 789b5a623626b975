"""MG-WFBP, Algorithm 1: from the last layer down, merge a layer into the one below where that ends sooner.

The paper's equations were followed where its pseudo-code differs:
* line 9 stops at layer 2, yet lines 13 and 25 read tau_b[1]: the start of every layer's backward is computed here;
* line 13 reads tau_b[l - 2], which does not exist for l = 2. By the derivation of Eq. 26 that value stands for
  tau_b[l - 1] + tb[l - 1], the moment layer l - 1 is ready. That is used for every l (equal for l > 2);
* the proof of Theorem 1 twice compares with b where Eq. 26 and 27 say a; a is used.

Theorem 1 calls the result optimal. It is not: each step compares the two choices for layer l as if layer l - 1 were
sent by itself. But l - 1 may be merged in turn. `optimal` gives the optimum; the docs say how large the optimality gap
is.
O(L): the paper computes all of tau_c again after every merge, O(L^2), but a merge changes none that was used before.
"""

import numpy as np

from mpips.overlap.problem import Groups, Problem, from_ends


def partition(problem: Problem) -> Groups:
    """The groups of Algorithm 1."""
    ready = np.cumsum(problem.compute[::-1])[::-1].tolist()  # tau_b + tb of every layer (Eq. 19)
    message = (problem.startup + problem.transfer).tolist()
    begin = ready[-1]  # tau_c of the layer (Eq. 20), of which merging changes only what lies below
    merged = set()
    for layer in range(problem.layers - 1, 0, -1):  # counted from 0: the paper's l is layer + 1
        if ready[layer - 1] - begin < problem.startup:  # Eq. 27
            message[layer - 1] += message[layer] - problem.startup  # Eq. 16: T(p + q) = T(p) + T(q) - a
            message[layer] = 0.0  # Eq. 14
            merged.add(layer)
        begin = max(begin + message[layer], ready[layer - 1])
    # The paper's layer l + 1 has index l here: a group ends at every l whose upper neighbour was not merged into it.
    return from_ends(layer for layer in range(1, problem.layers + 1) if layer not in merged)
