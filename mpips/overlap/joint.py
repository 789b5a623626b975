"""Plan both directions at once: which gradients are pushed together, and which parameters are pulled when.

The iteration runs from the start of one backward pass to the end of the next forward pass, when nothing is left on the
network. A layer may be pulled once its gradients have been pushed. If all pulls run in forward order, no pull can start
before the last push ends, since layer 1 is pushed last and pulled first. So the two directions never overlap, and the
iteration is the sum of the two makespans (see `problem`): the two separate optima together are the optimum, on any
network. The only way to gain is to pull the late layers *early*, while gradients of earlier layers are still on their
way. So a joint plan consists of

* push groups, sent from the last layer down;
* early pulls of the last `early` push groups, which hold the layers above some layer m: each of these groups is pulled
  right after its own push;
* pull groups of layers 1..m, pulled in forward order after the last push.

On a "duplex" network pushes and pulls have a link each. On a "shared" network one link carries both, in the order
above. Plans without early pulls belong to this family of plans (early = 0), so the result is never worse than the sum
of the separate optima. The result is the exact optimum of the family (tests compare it with enumeration). Plans that
hold pushes back behind more urgent pulls are not in the family.

Why the result is exact. Let F[m] be the time of pulling 1..m and computing 1..L from then on. F[m] depends neither on
the pushes nor on the early pulls.

On a "shared" network the only state between groups is the moment when the link is free. If this moment is later,
nothing after it becomes earlier. Let e[m, i] be the earliest end of the pushes of i + 1..L and of the early pulls of
the layers above m. e[m, i] follows the recurrence of `optimal`.

On a "duplex" network the state is a pair of moments: when the send link is free, and when the receive link is free.
Later moments depend monotonically on both, so it is enough to keep all undominated pairs: no other pair is as early in
both moments. The pushes of 1..m then start at the moment s at which the send link is free. Let a be the startup and T
the transfer time. With k groups, these pushes end at max(s + k a + T(1..m), R[m][k]), and the best k is taken. R[m][k]
is the least end, over partitions of 1..m into k groups, of the paths that start when a layer becomes ready: R[j][k] =
min over i < j of max(ready[i + 1] + k a + T(1..j), R[i][k - 1]).

The cost is O(L^3), in NumPy over whole rows. The group that attains a minimum is not stored. It is computed again at
the end, for the best plan only. The separate optima bound the time of a plan, so an m is left out if all its plans take
longer (`_select_candidates`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.overlap.problem import Groups, JointPlan, Link, Problem, from_ends, makespan, sums
from mpips.overlap.strategies import optimal

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
# relative gain below which a plan with early pulls is not taken
ROUNDING = 1e-12


def plan(push: Problem, pull: Problem, link: Link) -> JointPlan:
    """Return the fastest plan of the family that the module describes. Both problems describe the same layers."""
    if push.layers != pull.layers:
        raise ValueError(f"the push has {push.layers} layers and the pull {pull.layers}: give problems of one model")
    best = JointPlan(optimal(push), 0, optimal(pull))
    least = makespan(push, best.push) + makespan(pull, best.pull)
    seconds, joint = (_shared if link == "shared" else _duplex)(push, pull, least)
    return joint if seconds < least * (1 - ROUNDING) else best


def _table(problem: Problem, rest: Array, last: Array, candidates: Numbers) -> Array:
    """Return end[i, m], with a column for each m in `candidates`, which ascend.

    end[m, m] = last[m]. For i < m it is startup + min over i < j <= m of transfer(i + 1..j) + max(end[j, m], rest[i]).
    end[i, m] is infinite for i > m.

    As j grows, end[j, m] falls, and end[j, m] + transfer(1..j) also falls, because the first message can leave a layer
    out. So the minimum is at the first j for which end[j, m] is below rest[i], or at the j before. Rows after the last
    such j of all columns are skipped. rest[i] grows as i falls, so these rows are never needed again.
    """
    layers = problem.layers
    transfer = sums(problem.transfer)
    end = np.full((layers + 1, len(candidates)), np.inf)
    end[candidates, np.arange(len(candidates))] = last[candidates]
    # row i -> the first column with m > i
    first = np.searchsorted(candidates, np.arange(layers + 1), side="right")
    highest = end.max(axis=1, initial=-np.inf, where=np.isfinite(end))
    room = np.empty_like(end)
    stop = layers + 1
    for i in range(layers - 1, -1, -1):
        while stop > i + 2 and highest[stop - 2] < rest[i]:
            stop -= 1
        if (c := first[i]) == len(candidates):
            continue
        through = np.maximum(end[i + 1 : stop, c:], rest[i], out=room[i + 1 : stop, c:])
        through += (transfer[i + 1 : stop] - transfer[i])[:, None]
        np.min(through, axis=0, out=end[i, c:])
        end[i, c:] += problem.startup
        highest[i] = max(highest[i], end[i, c:].max())
    return end


def _forward(pull: Problem, candidates: Numbers) -> Array:
    """Return to_go[i, m], the seconds from the start of pulling i + 1..m to the end of the forward pass.

    There is a column for each m in `candidates`. At the start, layers 1..i are computed, and the layers above m have
    their parameters. The seconds are for the best groups. to_go[0, m] is F[m] of the module.
    """
    rest = _rest(pull)
    to_go = _table(pull, rest, np.zeros(pull.layers + 1), candidates)
    # With m = 0 nothing is pulled, so only the forward pass takes time.
    to_go[0, candidates == 0] = rest[0]
    return to_go


def _select_candidates(pull: Problem, pushed: Array, least: float) -> Numbers:
    """Return each m whose plans may take no longer than `least`, if pushes and early pulls take at least pushed[m].

    After the pushes and early pulls, a plan takes at least as long as the longer of two sequences: layer 1's pull and
    then all compute, or the pulls of 1..m and then the compute from layer m on.
    """
    m = np.arange(pull.layers + 1)
    rest, fetched = _rest(pull), sums(pull.transfer)
    forward = pull.startup + np.maximum(fetched[1] + rest[0], fetched + rest[np.maximum(m - 1, 0)])
    forward[0] = rest[0]
    return np.flatnonzero(pushed + forward <= least * (1 + ROUNDING))


def _rest(pull: Problem) -> Array:
    """Return rest[i], the compute of layers i + 1..L."""
    done = sums(pull.compute)
    return done[-1] - done


def _pulls(pull: Problem, to_go: Array, m: int) -> Groups:
    """Return the pull groups of 1..m that attain to_go[0] seconds. `to_go` is the column of m."""
    transfer, rest = sums(pull.transfer), _rest(pull)
    ends, i = [], 0
    while i < m:
        through = transfer[i + 1 : m + 1] + np.maximum(to_go[i + 1 : m + 1], rest[i])
        i += 1 + int(np.argmin(through))
        ends.append(i)
    return from_ends(ends)


def _shared(push: Problem, pull: Problem, least: float) -> tuple[float, JointPlan]:
    """Return the least time and its plan on one link, by the recurrence over e[m, i] for every m at once.

    For i >= m all groups are early, so e[m, i] does not depend on m: it is above[i]. For i < m, e[m, i] is below[i, m],
    whose recurrence starts from above[m] at i = m.
    """
    layers = push.layers
    above = np.zeros(layers + 1)
    for i in range(layers - 1, -1, -1):
        ready, _, early = _message_costs(push, pull, i)
        above[i] = np.min(np.maximum(above[i + 1 :], ready) + early)
    pushed = push.startup + np.maximum(above + sums(push.transfer), _rest(push)[0] + push.transfer[0])
    pushed[0] = above[0]
    candidates = _select_candidates(pull, pushed, least)
    below = _table(push, _rest(push), above, candidates)
    to_go = _forward(pull, candidates)
    total = below[0] + to_go[0]
    column = int(np.argmin(total))
    m = int(candidates[column])
    ends, i = [], 0
    while i < layers:
        ready, late, early = _message_costs(push, pull, i)
        through = (
            np.maximum(below[i + 1 : m + 1, column], ready) + late[: m - i]
            if i < m
            else (np.maximum(above[i + 1 :], ready) + early)
        )
        i += 1 + int(np.argmin(through))
        ends.append(i)
    return float(total[column]), _joint(from_ends(ends), m, _pulls(pull, to_go[:, column], m))


def _message_costs(push: Problem, pull: Problem, i: int) -> tuple[float, Array, Array]:
    """Return when layer i + 1 is ready, the seconds to push i + 1..j, and the seconds to push and then pull i + 1..j.

    The seconds are arrays with an element for each j > i.
    """
    ready = float(np.sum(push.compute[i:]))
    late = push.startup + np.cumsum(push.transfer[i:])
    return ready, late, late + pull.startup + np.cumsum(pull.transfer[i:])


def _joint(push: Groups, m: int, pull: Groups) -> JointPlan:
    return JointPlan(push, sum(first > m for first, _ in push), pull)


class _Fronts(NamedTuple):
    """The undominated pairs of times (send, receive) at which layers i + 1..L have been pushed and have been pulled.

    Each pair is a point. All points are in one list, and `slices[i]` is the slice with the points of layer i. A point
    of layer i is reached from its parent, a point of a layer j > i, by sending the group i + 1..j.
    """

    send: Array
    receive: Array
    layer: Numbers
    parent: Numbers
    slices: dict[int, slice]


def _fronts(push: Problem, pull: Problem, lowest: int) -> _Fronts:
    """Return the undominated pairs for every i from `lowest` on."""
    layers = push.layers
    ready, sent, fetched = _rest(push), sums(push.transfer), sums(pull.transfer)
    # by j: seconds to push, and to pull, layers 1..j in one group. The times of 1..i are subtracted below.
    pushing, pulling = push.startup + sent, pull.startup + fetched
    points = np.array([[0.0], [0.0], [pushing[-1]], [pulling[-1]]])
    slices, parents = {layers: slice(0, 1)}, [np.zeros(1, np.int64)]
    for i in range(layers - 1, lowest - 1, -1):
        pushed = np.maximum(points[0], ready[i])
        pushed += points[2]
        pushed -= sent[i]
        pulled = np.maximum(points[1], pushed)
        pulled += points[3]
        pulled -= fetched[i]
        # A dominated point may stay if another point has the same time of the push.
        order = np.argsort(pushed)
        least = np.minimum.accumulate(pulled[order])
        kept = order[np.concatenate(([0], np.flatnonzero(least[1:] < least[:-1]) + 1))]
        slices[i] = slice(len(pushed), len(pushed) + len(kept))
        parents.append(kept)
        new = np.empty((4, len(kept)))
        new[0], new[1], new[2], new[3] = pushed[kept], pulled[kept], pushing[i], pulling[i]
        points = np.concatenate((points, new), axis=1)
    layer = np.concatenate([np.full(len(parent), layers - number) for number, parent in enumerate(parents)])
    return _Fronts(points[0], points[1], layer, np.concatenate(parents), slices)


def _paths_from_ready(push: Problem, most: int) -> Array:
    """Return R[j, k], which the docstring of the module defines, for j = 0..L and k = 0..most."""
    layers = push.layers
    ready = np.cumsum(push.compute[::-1])[::-1]
    sent = sums(push.transfer)
    count = np.arange(most + 1)
    paths = np.full((layers + 1, most + 1), np.inf)
    paths[0, 0] = -np.inf
    room = np.empty((layers, most))
    for j in range(1, layers + 1):
        # max(ready[i + 1] + k a + T(1..j), R[i][k - 1]) for i < j and k <= j
        k = min(j, most)
        through = np.add(ready[:j, None], count[1 : k + 1] * push.startup + sent[j], out=room[:j, :k])
        np.maximum(through, paths[:j, :k], out=through)
        np.min(through, axis=0, out=paths[j, 1 : k + 1])
    return paths


def _groups_below(push: Problem, paths: Array, m: int, number: int) -> list[int]:
    """Return the last layers of the `number` groups of 1..m that attain paths[m, number], highest group first."""
    ready = np.cumsum(push.compute[::-1])[::-1]
    sent = sums(push.transfer)
    ends, j = [], m
    for k in range(number, 0, -1):
        ends.append(j)
        j = int(np.argmin(np.maximum(ready[:j] + k * push.startup + sent[j], paths[:j, k - 1])))
    return ends


def _duplex(push: Problem, pull: Problem, least: float) -> tuple[float, JointPlan]:
    layers = push.layers
    ready, sent, fetched = _rest(push), sums(push.transfer), sums(pull.transfer)
    # Lower bounds of pushes and early pulls: pushes take as long as without pulls, and the early pulls begin after the
    # first push.
    first = ready[-2] + push.startup + push.transfer[-1] + pull.startup
    pushed = np.full(layers + 1, makespan(push, optimal(push)))
    pushed[:-1] = np.maximum(pushed[:-1], first + fetched[-1] - fetched[:-1])
    candidates = _select_candidates(pull, pushed, least)
    to_go = _forward(pull, candidates)
    fronts = _fronts(push, pull, int(candidates[0]))
    # The largest number of messages below m. With more messages, they alone would take longer than a plan may take,
    # counted from the moment at which layer m + 1 is ready.
    room = max(0.0, float(np.max(least - to_go[0] - ready[candidates] - sent[candidates])))
    most = layers if push.startup * layers <= room else int(room / push.startup)
    paths = _paths_from_ready(push, max(most, 1))
    count = np.arange(paths.shape[1])
    best: tuple[float, int, int] = (np.inf, 0, 0)
    for column, m in enumerate(candidates):
        front = fronts.slices[int(m)]
        send = fronts.send[front, None]
        below = np.maximum(send + (count * push.startup + sent[m]), paths[m]) if m else send
        total = np.maximum(np.min(below, axis=1), fronts.receive[front]) + to_go[0, column]
        place = int(np.argmin(total))
        if total[place] < best[0]:
            best = float(total[place]), column, front.start + place
    value, column, point = best
    m = int(candidates[column])
    number = int(np.argmin(np.maximum(fronts.send[point] + count * push.startup + sent[m], paths[m])))
    ends_above = []
    while fronts.layer[point] < layers:
        point = int(fronts.parent[point])
        ends_above.append(int(fronts.layer[point]))
    ends_below = _groups_below(push, paths, m, number)[::-1] if m else []
    return value, _joint(from_ends([*ends_below, *ends_above]), m, _pulls(pull, to_go[:, column], m))
