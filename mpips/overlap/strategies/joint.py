"""Both directions of an iteration at once: which gradients to send together, and which parameters to fetch when.

The iteration runs from the start of one backward pass to the end of the next forward pass, after which nothing is left
on the network. A layer may be pulled once its gradients were pushed. If all pulls run in forward order, none can start
before the last push ends (layer 1 is pushed last and pulled first), so the two directions never meet, the iteration is
the sum of the two makespans, and two separate optima are the optimum, whatever the network. Something can be gained
only by pulling the late layers *early*, while gradients of earlier layers are still on their way. So a joint plan is

* push groups, sent from the last layer down;
* the last `early` of them, in layer order those above some layer m: each is pulled right after its own push;
* pull groups of layers 1..m, fetched in forward order after the last push.

Network "duplex": pushes and pulls have a link each. "shared": one link carries both, in the order above.
In-order plans are the case early = 0, so the result is never worse than the sum of the separate optima, and it is the
exact optimum of this family (tests compare it with enumeration). Pushes that are held back behind more urgent pulls are
outside of it.

Exactness. F[m], the time of pulling 1..m and computing 1..L from then on, depends on neither the pushes nor the early
pulls. For "shared" the only state between groups is when the link is free, and nothing after improves if it is freed
later; hence e[m, i], the earliest end of the pushes of i + 1..L with those above m pulled early, follows `optimal`'s
recurrence. For "duplex" the state is the pair (send link free, receive link free); later moments depend monotonically
on both, so keeping all undominated pairs loses nothing. The pushes below m then start at the send link's time s and end
at max(s + k a + T(1..m), R[m][k]) for the best number of groups k, where R[m][k] is the least end, over partitions of
1..m into k groups, of the paths that start with a layer's becoming ready:
R[j][k] = min over i < j of max(ready[i + 1] + k a + T(1..j), R[i][k - 1]).
O(L^3) in NumPy over whole rows; which group attains a minimum is looked up again on the way back, for one plan.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..stage import Groups, Stage, from_ends, makespan, sums
from . import optimal

Link = Literal["shared", "duplex"]
Array = NDArray[np.float64]
ROUNDING = 1e-12
"""Relative gain below which pulling early is not worth its name."""


class JointPlan(NamedTuple):
    """push: groups of layers 1..L. early: how many of the last are pulled at once. pull: groups of the layers below."""

    push: Groups
    early: int
    pull: Groups

    @property
    def first_early_layer(self) -> int:
        """Layers from this one on are pulled early; L + 1 if none is."""
        return self.push[-self.early][0] if self.early else self.push[-1][1] + 1


def plan(push: Stage, pull: Stage, link: Link) -> JointPlan:
    """The fastest plan of the family above. Both stages describe the same layers."""
    if push.layers != pull.layers:
        raise ValueError(f"the push has {push.layers} layers and the pull {pull.layers}: give two stages of one model")
    best = JointPlan(optimal.partition(push), 0, optimal.partition(pull))
    least = makespan(push, best.push) + makespan(pull, best.pull)
    found = _shared(push, pull) if link == "shared" else _duplex(push, pull)
    return found[1] if found[0] < least * (1 - ROUNDING) else best


def _table(problem: Stage, rest: Array, last: Array) -> Array:
    """end[i, m] = startup + min over i < j <= m of transfer(i + 1..j) + max(end[j, m], rest[i]), with end[m, m] =
    last[m]; infinite below the diagonal.

    end[j, m] + transfer(1..j) falls with j (leave a layer out of the first message), and so does end[j, m]; so the
    minimum is where end[j, m] falls below rest[i], at that j or the one before. No row behind the last such j of all
    columns is looked at; rest[i] grows as i falls, so these rows are never needed again.
    """
    layers = problem.layers
    transfer = sums(problem.transfer)
    end = np.full((layers + 1, layers + 1), np.inf)
    np.fill_diagonal(end, last)
    highest = last.copy()  # of each row's finite elements
    room = np.empty_like(end)
    stop = layers + 1
    for i in range(layers - 1, -1, -1):
        while stop > i + 2 and highest[stop - 2] < rest[i]:
            stop -= 1
        through = np.maximum(end[i + 1 : stop, i + 1 :], rest[i], out=room[i + 1 : stop, i + 1 :])
        through += (transfer[i + 1 : stop] - transfer[i])[:, None]
        np.min(through, axis=0, out=end[i, i + 1 :])
        end[i, i + 1 :] += problem.startup
        highest[i] = max(last[i], end[i, i + 1 :].max())
    return end


def _forward(pull: Stage) -> Array:
    """to_go[i, m]: seconds from the start of pulling i + 1..m, with 1..i and all above m there and layers up to i
    computed, to the end of the forward pass; in the best groups. to_go[0, m] is F[m]."""
    rest = _rest(pull)
    to_go = _table(pull, rest, np.zeros(pull.layers + 1))
    to_go[0, 0] = rest[0]  # nothing to pull: the forward pass alone
    return to_go


def _rest(pull: Stage) -> Array:
    """rest[i]: compute of layers i + 1..L."""
    done = sums(pull.compute)
    return done[-1] - done


def _pulls(pull: Stage, to_go: Array, m: int) -> Groups:
    """The groups of 1..m that take to_go[0, m]."""
    transfer, rest = sums(pull.transfer), _rest(pull)
    ends, i = [], 0
    while i < m:
        through = transfer[i + 1 : m + 1] + np.maximum(to_go[i + 1 : m + 1, m], rest[i])
        i += 1 + int(np.argmin(through))
        ends.append(i)
    return from_ends(ends)


def _shared(push: Stage, pull: Stage) -> tuple[float, JointPlan]:
    """The recurrence over e[m, i] for every m at once. At i >= m all groups are early, whatever m: above[i]. At i < m
    it is below[i, m], with above[m] at i = m."""
    layers = push.layers
    above = np.zeros(layers + 1)
    for i in range(layers - 1, -1, -1):
        ready, _, early = _message_costs(push, pull, i)
        above[i] = np.min(np.maximum(above[i + 1 :], ready) + early)
    below = _table(push, _rest(push), above)
    to_go = _forward(pull)
    total = below[0] + to_go[0]
    m = int(np.argmin(total))
    ends, i = [], 0
    while i < layers:
        ready, late, early = _message_costs(push, pull, i)
        through = np.maximum(below[i + 1 : m + 1, m], ready) + late[: m - i] if i < m else (
            np.maximum(above[i + 1 :], ready) + early
        )
        i += 1 + int(np.argmin(through))
        ends.append(i)
    return float(total[m]), _joint(from_ends(ends), m, _pulls(pull, to_go, m))


def _message_costs(push: Stage, pull: Stage, i: int) -> tuple[float, Array, Array]:
    """When layer i + 1 is ready; seconds to push i + 1..j, and to push and pull them, for j > i."""
    ready = float(np.sum(push.compute[i:]))
    late = push.startup + np.cumsum(push.transfer[i:])
    return ready, late, late + pull.startup + np.cumsum(pull.transfer[i:])


def _joint(push: Groups, m: int, pull: Groups) -> JointPlan:
    return JointPlan(push, sum(first > m for first, _ in push), pull)


class _Front(NamedTuple):
    """Undominated (send, receive) times at which layers i + 1..L are pushed and pulled, and how each came about."""

    send: Array
    receive: Array
    group_end: NDArray[np.int64]
    parent: NDArray[np.int64]


def _fronts(push: Stage, pull: Stage) -> list[_Front]:
    layers = push.layers
    ready = np.cumsum(push.compute[::-1])[::-1]
    sent, fetched = sums(push.transfer), sums(pull.transfer)
    fronts = [_Front(*(np.empty(0),) * 2, *(np.empty(0, np.int64),) * 2)] * layers
    fronts.append(_Front(np.zeros(1), np.zeros(1), np.zeros(1, np.int64), np.zeros(1, np.int64)))
    # All fronts behind i, flat: one candidate each.
    send, receive = fronts[layers].send, fronts[layers].receive
    where, index = np.full(1, layers), np.zeros(1, np.int64)
    for i in range(layers - 1, -1, -1):
        pushed = np.maximum(send, ready[i]) + push.startup + sent[where] - sent[i]
        pulled = np.maximum(receive, pushed) + pull.startup + fetched[where] - fetched[i]
        order = np.lexsort((pulled, pushed))
        least = np.minimum.accumulate(pulled[order])
        kept = order[np.concatenate(([True], least[1:] < least[:-1]))]
        fronts[i] = _Front(pushed[kept], pulled[kept], where[kept], index[kept])
        send, receive = np.concatenate((send, pushed[kept])), np.concatenate((receive, pulled[kept]))
        where = np.concatenate((where, np.full(len(kept), i)))
        index = np.concatenate((index, np.arange(len(kept))))
    return fronts


def _paths_from_ready(push: Stage) -> Array:
    """R[j, k] for j, k = 0..L."""
    layers = push.layers
    ready = np.cumsum(push.compute[::-1])[::-1]
    sent = sums(push.transfer)
    count = np.arange(layers + 1)
    paths = np.full((layers + 1, layers + 1), np.inf)
    paths[0, 0] = -np.inf
    room = np.empty_like(paths)
    for j in range(1, layers + 1):
        # max(ready[i + 1] + k a + T(1..j), R[i][k - 1]) for i < j and k <= j
        through = np.add(ready[:j, None], count[1 : j + 1] * push.startup + sent[j], out=room[:j, :j])
        np.maximum(through, paths[:j, :j], out=through)
        np.min(through, axis=0, out=paths[j, 1 : j + 1])
    return paths


def _groups_below(push: Stage, paths: Array, m: int, number: int) -> list[int]:
    """The last layers of the `number` groups of 1..m that attain paths[m, number], from the last group down."""
    ready = np.cumsum(push.compute[::-1])[::-1]
    sent = sums(push.transfer)
    ends, j = [], m
    for k in range(number, 0, -1):
        ends.append(j)
        j = int(np.argmin(np.maximum(ready[:j] + k * push.startup + sent[j], paths[:j, k - 1])))
    return ends


def _duplex(push: Stage, pull: Stage) -> tuple[float, JointPlan]:
    layers = push.layers
    to_go = _forward(pull)
    whole = to_go[0]
    fronts = _fronts(push, pull)
    paths = _paths_from_ready(push)
    sent, count = sums(push.transfer), np.arange(layers + 1)
    best: tuple[float, int, int, int] = (np.inf, 0, 0, 0)
    for m, front in enumerate(fronts):
        ends = np.maximum(front.send[:, None] + (count * push.startup + sent[m])[None], paths[m][None])
        number = np.argmin(ends, axis=1)
        pushed = np.take_along_axis(ends, number[:, None], axis=1)[:, 0] if m else front.send
        total = np.maximum(pushed, front.receive) + whole[m]
        point = int(np.argmin(total))
        if total[point] < best[0]:
            best = float(total[point]), m, point, int(number[point])
    value, m, point, number_of_groups = best
    ends_above, i = [], m
    while i < layers:
        front = fronts[i]
        i, point = int(front.group_end[point]), int(front.parent[point])
        ends_above.append(i)
    below = _groups_below(push, paths, m, number_of_groups) if m else []
    return value, _joint(from_ends([*reversed(below), *ends_above]), m, _pulls(pull, to_go, m))
