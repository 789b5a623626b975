"""A unit of a store that survives deaths: one whole round of it is there wherever its server is killed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from mpips.optimizers.base import Optimizer, State, state_dtypes
from mpips.store.keys.row_sparse import RowSparse
from mpips.store.recovery.memory.undo import Undo, with_state
from mpips.store.server.unit import Unit

Array = NDArray[Any]


class Surviving(Unit):
    """A unit with an undo copy. Its values and state lie in the memory of that, which outlives the process."""

    undo: Undo

    def open_write(self, start: int = 0, stop: int = 0) -> None:
        """Also keep the round before, from here on."""
        super().open_write()
        self.undo.open()
        if start < stop:
            self.undo.keep(start, stop)

    def pass_round(self) -> None:
        """The round before is what is stored."""
        self.undo.open()

    def keep(self, start: int, stop: int) -> None:
        """Copy what is about to be written."""
        self.undo.keep(start, stop)

    def keep_rows(self, gradient: RowSparse) -> RowSparse:
        """The same; a row may come once only."""
        gradient = gradient.merged()
        self.undo.keep_rows(gradient.rows)
        return gradient

    def give_up(self) -> None:
        """What is stored is that of the last complete round."""
        self.goes_back_to(self.undo.undo()[1])

    def goes_back_to(self, step: int | None) -> None:
        """What is stored is that of an optimizer's step; None: it has no state yet."""
        self.state, self.step = (None, 0) if step is None else (self.undo.state, step)

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Also take memory for its state."""
        super().set_optimizer(optimizer)
        self.undo = with_state(self.undo, state_dtypes(optimizer, self.stored.dtype))

    def begin_state(self, state: State) -> None:
        """Put it into the memory that outlives the process."""
        super().begin_state(self._in_its_memory(state))

    def put_state(self, state: State | None, step: int) -> None:
        """The same; whoever is killed meanwhile has no state."""
        self.undo.stated(None)
        super().put_state(None if state is None else self._in_its_memory(state), step)
        self.undo.stated(None if state is None else step)

    def overwritten(self, torn: bool) -> None:
        """Also say so to those who outlive this server."""
        super().overwritten(torn)
        self.undo.overwritten(torn)

    def stands(
        self, round_: int, pushes: Sequence[int] | None, state: State | None, step: int, torn: bool
    ) -> None:  # fmt: skip
        """Also say so to those who outlive this server."""
        super().stands(round_, pushes, state, step, torn)
        self.undo.stands(round_ if pushes is None else 0, self.stands_at, torn)

    def _in_its_memory(self, state: Sequence[Array]) -> State:
        for mine, given in zip(self.undo.state, state, strict=True):
            mine[...] = given
        return self.undo.state
