"""What pushes and pulls of a store do beside what they are to do: they save it, go on with a checkpoint, end claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from mpips.store.checkpoint.source import Saves, Written

T = TypeVar("T")


class Calls:
    """The calls of a store. `call` makes one, blocking, and says whether it has; `start` begins one. Both cost nothing
    more while nothing is to be done beside them."""

    def __init__(self, call: Callable[..., bool], start: Callable[..., Any]) -> None:
        self._plain = self.call, self.start = call, start
        self._latest: Written | None = None

    def save_regularly(self, saves: Saves, do: Callable[..., None]) -> None:
        """Let `saves` have its turn before each step. `do` makes a call that `call` has not made."""
        self._plain = _regularly(saves, *self._plain, do, lambda: self.write(saves.save()))
        self._alone()

    def write(self, saving: Written | None) -> None:
        """Go on with a checkpoint after each call, until it is there, or another one begins."""
        if saving is None:
            return

        def over() -> None:
            if self._latest is saving:
                self._alone()

        call, start = self._plain
        self._latest = saving
        self.call, self.start = _and_then(call, saving.go_on, over), _and_then(start, saving.go_on, over)

    def before_a_push(self, do: Callable[[], None]) -> None:
        """Before the next push `do`, once."""

        def first(call: Callable[..., T]) -> Callable[..., T]:
            def called(what: str, *words: Any) -> T:
                if what != "pull":
                    do()
                    self._alone()
                return call(what, *words)

            return called

        call, start = self._plain
        self.call, self.start = first(call), first(start)

    def _alone(self) -> None:
        self.call, self.start = self._plain


def _and_then(call: Callable[..., T], go_on: Callable[[], bool], over: Callable[[], None]) -> Callable[..., T]:
    """`call`, and after each one `go_on`; `over` when that says that it has ended."""

    def called(*words: Any) -> T:
        result = call(*words)
        if go_on():
            over()
        return result

    return called


def _regularly(
    saves: Saves,
    call: Callable[..., bool],
    start: Callable[..., Any],
    do: Callable[..., None],
    save: Callable[[], None],
) -> tuple[Callable[..., bool], Callable[..., Any]]:
    """`call`, which does `do` where that has not been done, and `start`, with a `save` before those that begin a step
    before which one is due."""

    def called(what: str, key: Any, *words: Any) -> bool:
        if what == "pull":
            return call(what, key, *words)
        if saves.is_due(key):
            save()
        saves.pushing = key
        try:
            if not call(what, key, *words):
                do(what, key, *words)
        finally:
            saves.pushing = ()
        saves.count(key)
        return True

    def started(what: str, key: Any, *words: Any) -> Any:
        if what == "pull":
            return start(what, key, *words)
        if saves.is_due(key):
            save()
        handle = start(what, key, *words)
        saves.count(key)
        return handle

    return called, started
