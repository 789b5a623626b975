"""Standard output that cannot be written: a command goes on, its files are written, and it says so once, at its end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class _Lasting:
    """A stream in whose place there is nothing once it cannot be written; `lost` says why.

    A pipe that nobody reads any more is no such case: there a command ends.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return self.stream.write(text)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._lose(error)

    def close_up(self) -> None:
        """Flush for the last time, so that the interpreter has nothing left to fail with at its exit."""
        try:
            self.stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        self.lost = self.lost or error
        with suppress(OSError):  # a stream without a descriptor has no exit to fail at
            mine, nothing = self.stream.fileno(), os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, mine)
            os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def lasting() -> Iterator[None]:
    """Around a command: one sentence on standard error, and exit code 1 for 0, where its output has been lost.

    A standard output that was closed from the start is one that nobody wants: it is the null device.
    """
    if isinstance(sys.stdout, _Lasting):  # the command around this one tells
        yield
        return
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 it takes the descriptor that was closed
        os.set_inheritable(sys.stdout.fileno(), True)
    kept = _Lasting(sys.stdout)
    sys.stdout = kept  # type: ignore[assignment]
    code: Any = 0
    try:
        yield
    except SystemExit as end:
        code = end.code
        raise
    except BaseException:
        code = 1
        raise
    finally:
        sys.stdout = kept.stream
        kept.close_up()
        if kept.lost is not None:
            _tell(kept.lost)
            if not code:
                sys.exit(1)


def _tell(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        return
    with suppress(OSError):
        print(f"Error: standard output cannot be written: {error.strerror or error}", file=sys.stderr, flush=True)
