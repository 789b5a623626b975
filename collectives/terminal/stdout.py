"""Standard output that cannot be written: a command goes on, writes its files, and says so once, at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class _Lasting:
    """A stream that turns into the null device once it cannot be written; `lost` says why. A pipe that nobody reads any
    more is no such case: there a command ends."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.lost = stream, ""

    def write(self, text: str) -> int:
        self.trying(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self.trying(self.stream.flush)

    def trying(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.lost = self.lost or error.strerror or str(error)
            self.drop()

    def drop(self) -> None:
        """What is still in the stream's buffer goes to the null device, or the interpreter would fail with it."""
        with suppress(OSError):  # a stream without a descriptor
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())
            os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def lasting() -> Iterator[None]:
    """Around a command: one sentence on standard error, and exit code 1 for 0, where its output has been lost. A
    standard output that was closed from the start is the null device."""
    if isinstance(sys.stdout, _Lasting):  # the command around this one tells
        yield
        return
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 it takes the descriptor that was closed
        os.set_inheritable(sys.stdout.fileno(), True)
    kept = _Lasting(sys.stdout)
    sys.stdout, code = kept, 1  # type: ignore[assignment]
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
        raise
    finally:
        sys.stdout = kept.stream
        try:
            kept.flush()
        except BrokenPipeError:
            kept.drop()
        if kept.lost:
            with suppress(OSError):
                print(f"Error: standard output cannot be written: {kept.lost}", file=sys.stderr, flush=True)
            if not code:
                sys.exit(1)
