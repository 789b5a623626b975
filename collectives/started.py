"""A collective that has been started: steps that are taken one by one, until it is done or given up."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

from collectives.errors import CollectiveError

HELD: Iterator[None] = iter(())
"""In place of an operation's steps: it has not begun, as something else comes first."""


def close(steps: Iterable[None]) -> None:
    """End an operation that is given up at once, not when nobody keeps its error any more."""
    if isinstance(steps, Generator):
        steps.close()


class Started:
    """A started run of a plan: `what` is the call. Those that are `exclusive` take turns; others run beside them."""

    def __init__(self, what: str, steps: Iterator[None], exclusive: bool):
        self.what, self.steps, self.exclusive = what, steps, exclusive
        self.done = False
        self.error: Exception | None = None
        self.given_up_for: BaseException | None = None

    def step(self) -> None:
        try:
            next(self.steps)
        except StopIteration:
            self.done = True
        except Exception as error:
            self.done, self.error = True, error
        except BaseException as error:
            self.give_up(error)
            raise

    def give_up(self, error: BaseException) -> None:
        """It was interrupted here."""
        self.given_up_for = error
        self.done, self.error = True, CollectiveError(f"{self.what} was given up: {type(error).__name__}")
