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
O(L^3) in NumPy over whole rows.
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


def _forward(pull: Stage) -> tuple[Array, NDArray[np.int64]]:
    """F[m] for m = 0..L, and last[i, m]: where the group from layer i + 1 on ends in the best pull of 1..m.

    F[m]: seconds from the start of pulling 1..m, with all above m there, to the end of the forward pass.
    """
    layers = pull.layers
    transfer, rest = sums(pull.transfer), sums(pull.compute)
    rest = rest[-1] - rest  # rest[i]: compute of layers i + 1..L
    to_go = np.full((layers + 1, layers + 1), np.inf)  # [i, m]: layers i + 1..m still to pull
    np.fill_diagonal(to_go, 0.0)
    last = np.zeros((layers + 1, layers + 1), np.int64)
    for i in range(layers - 1, -1, -1):
        through = transfer[i + 1 :, None] - transfer[i] + np.maximum(to_go[i + 1 :, i + 1 :], rest[i])
        best = np.argmin(through, axis=0)
        to_go[i, i + 1 :] = pull.startup + np.take_along_axis(through, best[None], axis=0)[0]
        last[i, i + 1 :] = i + 1 + best
    whole = to_go[0].copy()
    whole[0] = rest[0]  # nothing to pull: the forward pass alone
    return whole, last


def _follow(last: NDArray[np.int64], stop: int) -> Groups:
    """Groups of 1..stop, where the one that starts at layer i + 1 ends at last[i]."""
    ends, i = [], 0
    while i < stop:
        i = int(last[i])
        ends.append(i)
    return from_ends(ends)


def _shared(push: Stage, pull: Stage) -> tuple[float, JointPlan]:
    """Recurrence over e[m, i] for every m at once: rows are m, columns the layers still to be pushed."""
    layers = push.layers
    ready = np.cumsum(push.compute[::-1])[::-1]
    sent, fetched = sums(push.transfer), sums(pull.transfer)
    end = np.full((layers + 1, layers + 1), np.inf)
    end[:, layers] = 0.0
    last = np.zeros((layers + 1, layers + 1), np.int64)
    for i in range(layers - 1, -1, -1):
        # Above m (rows 0..i) a push is followed by its pull; below, the group may not reach over m.
        cost = push.startup + sent[i + 1 :] - sent[i]
        both = cost + pull.startup + fetched[i + 1 :] - fetched[i]
        through = np.maximum(end[:, i + 1 :], ready[i])
        through[: i + 1] += both
        through[i + 1 :] += cost
        rows = np.arange(layers + 1)[:, None]
        through[(rows > i) & (np.arange(i + 1, layers + 1)[None] > rows)] = np.inf
        best = np.argmin(through, axis=1)
        end[:, i] = np.take_along_axis(through, best[:, None], axis=1)[:, 0]
        last[:, i] = i + 1 + best
    whole, pulls = _forward(pull)
    total = end[:, 0] + whole
    m = int(np.argmin(total))
    return float(total[m]), _joint(_follow(last[m], layers), m, _follow(pulls[:, m], m))


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


def _paths_from_ready(push: Stage) -> tuple[Array, NDArray[np.int64]]:
    """R[j, k] for j, k = 0..L, and the i that attains it (layers 1..i remain after the first message i + 1..j)."""
    layers = push.layers
    ready = np.cumsum(push.compute[::-1])[::-1]
    sent = sums(push.transfer)
    count = np.arange(layers + 1)
    paths = np.full((layers + 1, layers + 1), np.inf)
    paths[0, 0] = -np.inf
    rest = np.zeros((layers + 1, layers + 1), np.int64)
    for j in range(1, layers + 1):
        start = ready[:j, None] + (count[1 : j + 1] * push.startup + sent[j])[None]
        through = np.maximum(start, paths[:j, :j])
        rest[j, 1 : j + 1] = np.argmin(through, axis=0)
        paths[j, 1 : j + 1] = np.min(through, axis=0)
    return paths, rest


def _duplex(push: Stage, pull: Stage) -> tuple[float, JointPlan]:
    layers = push.layers
    whole, pulls = _forward(pull)
    fronts = _fronts(push, pull)
    paths, rest = _paths_from_ready(push)
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
    below, j = [], m
    for k in range(number_of_groups if m else 0, 0, -1):
        below.append(j)
        j = int(rest[j, k])
    return value, _joint(from_ends([*reversed(below), *ends_above]), m, _follow(pulls[:, m], m))
