"""The short way (`mpips.short`) of a key that workers of one node sum together: all of them where there are no servers,
or those of a client whose master then pushes the sum. Each makes the same calls, in the same order, as the general way
does, so that it does not matter which of them take it. Lists have a better one: `mpips.fused`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from mpips.short import Blocks, Task, came, then_pull

if TYPE_CHECKING:
    from mpips.keys import Key
    from mpips.pure import Pure
    from mpips.served import Served

Array = NDArray[Any]


def flat(array: Array) -> Array:
    """1-D; the array itself where it is that already, as collectives know it again."""
    return array if array.ndim == 1 else array.reshape(-1)


class Everywhere:
    """A key of a store without servers."""

    __slots__ = ("_key", "_pure")
    lists = False

    def __init__(self, pure: Pure, key: Key) -> None:
        self._pure, self._key = pure, key

    def push(self, array: Array, priority: int) -> Task | None:
        return self._pure.push_now(self._key, flat(array))

    post = push

    def read(self) -> None:
        return None

    def pull(self, out: Array) -> None:
        flat(out)[...] = self._pure.value(self._key)

    def pushpull(self, array: Array, out: Array, priority: int) -> Task | None:
        left = self._pure.push_now(self._key, flat(array))
        if left is not None:
            return self._then_pull(left, out)
        self.pull(out)
        return None

    def _then_pull(self, push: Task, out: Array) -> Task:
        yield from push
        self.pull(out)


class InClient(Blocks):
    """A key whose sum over a client its rank 0 pushes, and which all read from the servers' memory."""

    __slots__ = ("_master", "_served")
    lists = False

    def __init__(self, served: Served, key: Key) -> None:
        super().__init__(served.session, key, 0)
        self._served, self._master = served, bool(key.pushes)

    def push(self, array: Array, priority: int) -> Task | None:
        return self.post(array, priority)

    def read(self) -> None:
        return None

    def post(self, array: Array, priority: int) -> Task | None:
        key = self._key
        ready = not key.failed
        for words, mine in self._mine if self._master else ():
            ready = ready and came(words, mine, key.round)
        if not ready:
            return self._later(array, priority)
        self._served.push_now(key, flat(array), priority, self._lent)
        return None

    def _later(self, array: Array, priority: int) -> Task:
        """The general way; nothing is begun before the first step."""
        yield from self._served.push(self._key, flat(array), priority)

    def pushpull(self, array: Array, out: Array, priority: int) -> Task | None:
        left = self.post(array, priority)
        return self.pull(out) if left is None else then_pull(self._session, self._key, left, out)
