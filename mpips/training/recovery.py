"""`Recovery`: repeat a call that the death of a process has interrupted.

A Trainer, a DistributedOptimizer and a LocalSGD all use it to survive deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from mpips.collectives.errors import CollectiveError, MismatchError
from mpips.store.runtime.errors import LostError
from mpips.store.runtime.rendezvous import Items

if TYPE_CHECKING:
    from mpips.store.api import KVStore
    from mpips.store.keys.key import Name, Rounds

T = TypeVar("T")


class Recovery:
    """Makes calls on one worker, and lets all workers continue if a process dies during a call.

    1. A process dies. The call raises an error on every worker that is alive.
    2. `kv.recover()` repairs the store. Afterwards every key holds a complete round (a push by every worker), and
       spares have replaced dead workers and servers.
    3. In `meet()`, the workers report their progress to each other. Each worker then goes to a point in its training
       that fits the other workers and the store. Only the owner of the training loop knows how to do this, so it passes
       this function.
    4. The call is made again.

    If another process dies in step 2 or 3, the workers begin again with step 2. In a store that does not survive
    deaths (without the option `spares`), the caller gets the error at once.

    Args:
        kv: The store.
        keys: The keys of the parameters that are trained.
        meet: A function that does step 3, or postpones it to the next call. Collective over the workers.
    """

    def __init__(self, kv: KVStore, keys: Sequence[Name], meet: Callable[[], object]) -> None:
        self._kv = kv
        self._keys = keys
        self._meet = meet
        # the result of the last `kv.recover`
        self._rounds: Rounds | None = None

    def run(self, call: Callable[[], T]) -> T:
        """Make a call, and repeat it after each recovery until it succeeds. Return its result. Blocking."""
        while True:
            try:
                return call()
            except CollectiveError as error:
                self.recover(error)

    def run_once(self, call: Callable[[], T]) -> T | None:
        """Make a call and return its result. If a failure interrupts it, recover and return None. Blocking."""
        try:
            return call()
        except CollectiveError as error:
            self.recover(error)
        return None

    def recover(self, error: CollectiveError | None = None, grow: bool = False) -> None:
        """Let the store recover, and call `meet`. Collective over the workers, blocking.

        Args:
            error: The error of the call that was interrupted, or None.
            grow: True to turn waiting spares into workers.

        Raises:
            CollectiveError: `error` itself, if a repeated call would only fail again: no process has died, and no
                worker has pushed a round since the last recovery. A MismatchError is raised again at once.
            LostError: A part of a key is lost. Only a checkpoint helps.
        """
        kv = self._kv
        while True:
            if error is not None and (not kv.layout.survives or isinstance(error, (MismatchError, LostError))):
                raise error
            before, self._rounds = self._rounds, kv.recover(grow)
            broken = [*self._rounds.torn, *(key for key in self._keys if key not in self._rounds)]
            if broken:
                raise LostError(f"key {broken[0]!r} is not whole after a death: go on from a checkpoint") from error
            try:
                # In an asynchronous store only some workers may have pushed, so they report this to each other.
                if error is not None and not kv.layout.changed:
                    advanced = b"" if self._rounds == before else b"advanced"
                    if not any(kv.worker.agree("recovery without a death", data=advanced)):
                        raise error
                self._meet()
            except CollectiveError as other:
                if other is error:
                    raise
                error = other
            else:
                return


def check_alike(kv: KVStore, call: str, arguments: Items, refusal: BaseException | None) -> None:
    """Check that all workers make this call with equal arguments. If they do not, all workers raise the same error.

    `refusal` is the error that this worker's own arguments have caused, or None. A spare that has replaced a dead
    worker does not compare, because the other workers made the call long ago.
    """
    if not kv.worker.fresh:
        kv.worker.agree(call, arguments, refusal, noun="argument")
    elif refusal is not None:
        raise refusal
