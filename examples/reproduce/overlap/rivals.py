"""iBatch, a rival of the optimum: the faster result of its Algorithms 1 and 2; and a table of all strategies.

Both algorithms walk along the layers, and end a batch where the communication of batch k + 1 just exceeds the
computation of batch k (Eq. 5). Algorithm 1 begins at the front (l_1, l_2, ..), Algorithm 2 at the back (l_{N-1},
l_{N-2}, ..). Where the paper's pseudo-code says too little, its equations were followed:

* Algorithm 1, line 5 leaves l_2 open (all remaining pairs share l_1). The smallest l_2 is taken: it has the least
  excess of communication over computation, which is what the text asks of every step.
* Algorithm 2, line 5 sums the last batch from l_{N-1} on, but that batch begins at l_{N-1} + 1. l_{N-2} may be 0 (two
  batches), as the range [0, ..] of line 10 shows.
* Neither says what to do if nothing meets Eq. 5, because the computation is too long for all that is left to send. The
  end with the least difference is taken, as the text intends. Going forward, this puts all remaining layers into one
  batch; going backward, it takes one layer; and if the first step has no pair, it is layer 1 | layers 2..L.
* Eq. 4 gives the right time only if Eq. 5 holds, so the two candidates are compared by the timeline.
"""

import numpy as np

from mpips.overlap.problem import Groups, Problem, from_ends, makespan, sums
from mpips.overlap.strategies import PARTITIONS as OURS


def ibatch(problem: Problem) -> Groups:
    """Return the groups of the algorithm with the smaller makespan."""
    if problem.layers == 1:
        return ((1, 1),)
    candidates = forward(problem), backward(problem)
    return min(candidates, key=lambda groups: makespan(problem, groups))


def forward(problem: Problem) -> Groups:
    """Algorithm 1: l_1, l_2, .., l_N = L. Needs two layers."""
    compute, sent = sums(problem.compute), problem.startup + sums(problem.transfer)
    ends = _first_pair_forward(compute, sent, problem.layers)
    while ends[-1] < problem.layers:
        # The computation of the batch before overlaps the next message.
        target = compute[ends[-1]] - compute[ends[-2]]
        ends.append(_shortest_message(sent, ends[-1], target))
    return from_ends(ends)


def backward(problem: Problem) -> Groups:
    """Algorithm 2: l_{N-1}, l_{N-2}, .., 0. Needs two layers."""
    compute, sent = sums(problem.compute), problem.startup + sums(problem.transfer)
    # L, l_{N-1}, l_{N-2}, descending
    starts = _first_pair_backward(compute, sent, problem.layers)
    while starts[-1] > 0:
        message = sent[starts[-2]] - sent[starts[-1]] + problem.startup
        starts.append(_longest_compute(compute, starts[-1], message))
    return from_ends(sorted(starts[:-1]))


def _shortest_message(sent: np.ndarray, begin: int, target: float) -> int:
    """Return the smallest end whose message from begin + 1 takes longer than `target` (lines 10, 11), or the last."""
    startup = sent[0]
    enough = np.flatnonzero(sent[begin + 1 :] - sent[begin] + startup > target)
    return begin + 1 + int(enough[0]) if len(enough) else len(sent) - 1


def _longest_compute(compute: np.ndarray, end: int, message: float) -> int:
    """Return the smallest begin whose compute of begin + 1..end is shorter than `message`, or end - 1 if none is."""
    enough = np.flatnonzero(compute[end] - compute[:end] < message)
    return int(enough[0]) if len(enough) else end - 1


def _first_pair_forward(compute: np.ndarray, sent: np.ndarray, layers: int) -> list[int]:
    """Choose l_1 and l_2 (lines 1-5).

    Among the pairs that meet Eq. 5 choose that with most compute before l_1, then least to pull first, then least
    excess.
    """
    # A pair with this l_1 exists if it meets Eq. 5 with l_2 = L, which sends most.
    possible = sent[layers] - sent[1:layers] + sent[0] > compute[1:layers]
    if not possible.any():
        return [1, layers]
    first = 1 + np.flatnonzero(possible)
    longest = first[compute[first] == compute[first].max()]
    chosen = int(longest[np.argmin(sent[longest])])
    return [chosen, _shortest_message(sent, chosen, compute[chosen])]


def _first_pair_backward(compute: np.ndarray, sent: np.ndarray, layers: int) -> list[int]:
    """Choose l_{N-1} and l_{N-2} (lines 1-5).

    Choose those with most compute of batch N - 1 during the last message, then least compute in the last batch.
    """
    best: tuple[tuple[float, float], list[int]] | None = None
    for last in range(1, layers):
        message = sent[layers] - sent[last] + sent[0]
        before = _longest_compute(compute, last, message)
        overlapped = compute[last] - compute[before]
        if overlapped < message:
            key = (overlapped, -(compute[layers] - compute[last]))
            if best is None or key > best[0]:
                best = key, [layers, last, before]
    return best[1] if best else [layers, 1, 0]


# name -> groups of one direction; "sequential", a parameter server's default (iBatch, figure 4a), equals "single"
PARTITIONS = {"sequential": OURS["single"], **OURS, "ibatch": ibatch}
