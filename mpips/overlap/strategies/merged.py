"""MG-WFBP, Algorithm 1: from the last layer down, merge a layer into the one below where that ends sooner.

The paper's equations were followed where its pseudo-code differs:
* line 9 stops at layer 2, yet lines 13 and 25 read tau_b[1]: the start of every layer's backward is computed here;
* line 13 reads tau_b[l - 2], which does not exist for l = 2. By the derivation of Eq. 26 that value stands for
  tau_b[l - 1] + tb[l - 1], the moment layer l - 1 is ready, which is used for every l (equal for l > 2);
* the proof of Theorem 1 twice compares with b where Eq. 26 and 27 say a; a is used.

Theorem 1 calls the result optimal. It is not: each step compares the two choices for layer l as if layer l - 1
were sent by itself, but l - 1 may be merged in turn. `optimal` gives the optimum; docs/overlap.md says how far it is.
O(L^2), as in the paper.
"""

import numpy as np
from numpy.typing import NDArray

from ..stage import Groups, Stage, from_ends


def partition(problem: Stage) -> Groups:
    layers = problem.layers
    ready = _ready(problem)
    message = problem.startup + problem.transfer
    begin = _communication_start(message, ready)
    merged = set()
    for layer in range(layers - 1, 0, -1):  # counted from 0: the paper's l is layer + 1
        if ready[layer - 1] - begin[layer] < problem.startup:  # Eq. 27
            message[layer - 1] += message[layer] - problem.startup  # Eq. 16: T(p + q) = T(p) + T(q) - a
            message[layer] = 0.0  # Eq. 14
            begin = _communication_start(message, ready)
            merged.add(layer)
    # The paper's layer l + 1 has index l here: a group ends at every l whose upper neighbour was not merged into it.
    return from_ends(layer for layer in range(1, layers + 1) if layer not in merged)


def _ready(problem: Stage) -> NDArray[np.float64]:
    """tau_b + tb of every layer (Eq. 19), from the start of the backward pass."""
    return np.cumsum(problem.compute[::-1])[::-1]


def _communication_start(message: NDArray[np.float64], ready: NDArray[np.float64]) -> NDArray[np.float64]:
    """tau_c of every layer (Eq. 20)."""
    begin = ready.copy()
    for layer in range(len(ready) - 2, -1, -1):
        begin[layer] = max(begin[layer + 1] + message[layer + 1], ready[layer])
    return begin
