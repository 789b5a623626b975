"""Rivals of the optimum: iBatch, Algorithms 1 and 2, of their two results the faster; and all strategies by name.

Both walk along the layers and end each batch where the communication of batch k + 1 just exceeds the computation of
batch k (Eq. 5), one from the front (l_1, l_2, ..), one from the back (l_{N-1}, l_{N-2}, ..). The paper's equations were
followed where its pseudo-code says too little:
* Algorithm 1, line 5 leaves l_2 open (all remaining pairs share l_1): the smallest l_2 is taken, which is what the text
  asks of every step, the least excess of communication over computation;
* Algorithm 2, line 5 sums the last batch from l_{N-1} on; it begins at l_{N-1} + 1. l_{N-2} may be 0 (two batches), as
  line 10's range [0, ..] shows;
* neither says what to do where nothing meets Eq. 5 (computation too long for all that is left to send). The end with
  the least difference is taken, so that the text's aim still holds: the rest of the layers in one batch going forward,
  one layer going backward, and layer 1 | layers 2..L where the first step has no pair;
* Eq. 4 counts the time rightly only where Eq. 5 holds, so the two candidates are compared by the timeline.
"""

import numpy as np

from mpips.overlap.problem import Groups, Problem, from_ends, makespan, sums
from mpips.overlap.strategies import PARTITIONS as OURS


def ibatch(problem: Problem) -> Groups:
    """The groups of the algorithm whose makespan is less."""
    if problem.layers == 1:
        return ((1, 1),)
    candidates = forward(problem), backward(problem)
    return min(candidates, key=lambda groups: makespan(problem, groups))


def forward(problem: Problem) -> Groups:
    """Algorithm 1: l_1, l_2, .., l_N = L. Needs two layers."""
    compute, sent = sums(problem.compute), problem.startup + sums(problem.transfer)
    ends = _first_pair_forward(compute, sent, problem.layers)
    while ends[-1] < problem.layers:
        target = compute[ends[-1]] - compute[ends[-2]]  # the batch before overlaps the next message
        ends.append(_shortest_message(sent, ends[-1], target))
    return from_ends(ends)


def backward(problem: Problem) -> Groups:
    """Algorithm 2: l_{N-1}, l_{N-2}, .., 0. Needs two layers."""
    compute, sent = sums(problem.compute), problem.startup + sums(problem.transfer)
    starts = _first_pair_backward(compute, sent, problem.layers)  # L, l_{N-1}, l_{N-2}, descending
    while starts[-1] > 0:
        message = sent[starts[-2]] - sent[starts[-1]] + problem.startup
        starts.append(_longest_compute(compute, starts[-1], message))
    return from_ends(sorted(starts[:-1]))


def _shortest_message(sent: np.ndarray, begin: int, target: float) -> int:
    """Smallest end > begin whose message from begin + 1 exceeds target (lines 10, 11); all the rest if none does."""
    startup = sent[0]
    enough = np.flatnonzero(sent[begin + 1 :] - sent[begin] + startup > target)
    return begin + 1 + int(enough[0]) if len(enough) else len(sent) - 1


def _longest_compute(compute: np.ndarray, end: int, message: float) -> int:
    """Smallest begin < end whose compute of begin + 1..end is below message; one layer if none is."""
    enough = np.flatnonzero(compute[end] - compute[:end] < message)
    return int(enough[0]) if len(enough) else end - 1


def _first_pair_forward(compute: np.ndarray, sent: np.ndarray, layers: int) -> list[int]:
    """Lines 1-5: of the pairs that meet Eq. 5 those with most compute before l_1, least to pull first, least excess."""
    possible = sent[layers] - sent[1:layers] + sent[0] > compute[1:layers]  # l_2 = L sends most
    if not possible.any():
        return [1, layers]
    first = 1 + np.flatnonzero(possible)
    longest = first[compute[first] == compute[first].max()]
    chosen = int(longest[np.argmin(sent[longest])])
    return [chosen, _shortest_message(sent, chosen, compute[chosen])]


def _first_pair_backward(compute: np.ndarray, sent: np.ndarray, layers: int) -> list[int]:
    """Lines 1-5: most compute of batch N - 1 under the last message, then least compute in the last batch."""
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


PARTITIONS = {"sequential": OURS["single"], **OURS, "ibatch": ibatch}
"""Name -> groups of one direction. `sequential`, a parameter server's default (iBatch, figure 4a), has `single`'s."""
