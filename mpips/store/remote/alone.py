"""What a worker that is nobody's fellow member does: it pushes and pulls by itself. `client` has the same calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.store.keys.key import Key
from mpips.store.remote.pull import Pull
from mpips.store.remote.push import Push
from mpips.store.runtime.tasks import Task, together

Array = NDArray[Any]


class Alone:
    """A worker by itself. `one_node`: all servers are on its node."""

    def __init__(self, push: Push, pull: Pull, one_node: bool, asynchronous: bool) -> None:
        self._push, self._pull = push, pull
        self._one_node, self._asynchronous = one_node, asynchronous

    def push(self, key: Key, flat: Array, priority: int) -> Task[None]:
        """Contribute `flat` (1-D) to the key's next round."""
        return self._push.whole(key, flat, priority)

    def pull(self, key: Key, out: Array) -> Task[None]:
        """Read the key into `out` (1-D)."""
        return self._pull.part(key, out, key.shards)

    def pushpull(self, key: Key, flat: Array, out: Array, priority: int) -> Task[None]:
        """Both. Between nodes later pieces go to the servers while the answer to earlier ones comes."""
        if self._one_node or self._asynchronous or len(key.pieces) == 1:
            # Servers may still read later elements of `flat` while earlier ones of the result are written.
            wait = self._asynchronous or (out is not flat and np.may_share_memory(flat, out))
            yield from self._push.whole(key, flat, priority, wait)
            yield from self._pull.part(key, out, key.shards)
            return
        key.round += 1
        pushes = [self._push.part(key, key.round, flat, priority, piece.pushes, wait=False) for piece in key.pieces]
        pairs = zip(key.pieces, pushes, strict=True)
        yield from together([self._pull.exchange(key, push, out, piece.pushes) for piece, push in pairs])

    # ---- lists

    def push_list(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        """Push all keys before one is waited for."""
        return together([self.push(key, flat, priority) for key, flat in zip(keys, flats, strict=True)])

    def pull_list(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        """Ask for all keys before one is waited for."""
        return together([self.pull(key, out) for key, out in zip(keys, outs, strict=True)])

    def pushpull_list(
        self, keys: Sequence[Key], flats: Sequence[Array], outs: Sequence[Array], priority: int
    ) -> Task[None]:
        """Both, of all keys."""
        each = zip(keys, flats, outs, strict=True)
        return together([self.pushpull(key, flat, out, priority) for key, flat, out in each])
