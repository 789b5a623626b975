"""A generation without ranks, for an engine that is tested alone."""

from __future__ import annotations

from collectives.fabric.wait import Limits
from mpips import StoreError


class FakeGeneration:
    """It ends when it is told to (`over`), or by an operation that fails."""

    def __init__(self, stall_seconds: float = 30.0, timeout_seconds: float = 30.0) -> None:
        self.limits = Limits(stall_seconds, timeout_seconds)
        self.over: StoreError | None = None

    def check(self) -> None:
        if self.over is not None:
            raise self.over

    def look(self, waited: float) -> None:
        self.check()

    def end(self, what: str, error: BaseException) -> BaseException:
        self.over = self.over or StoreError(f"{what}: {error}")
        return self.over if isinstance(error, StoreError) else error
