"""One rank of a job: `python -m mpips SCRIPT.py ARGS` or `python -m mpips -m MODULE ARGS`, under any launcher.

As `python -m mpi4py`, which it builds on, but an uncaught exception, or an exit with another code than 0, also names
its rank and ends the whole job at once.
"""

import atexit
import io
import os
import socket
import sys
import threading
from contextlib import suppress

from mpi4py.run import main

from mpips.runtime.last_words import end, end_unstarted, is_started
from mpips.world import FAILING, GOODBYE, PRESENCE, PRESENT, launched_as

COMMANDS = ("run", "doctor", "script", "train", "bench", "tune", "sim", "plan", "chaos", "lab")
"""Words of the `mpips` command, which are no scripts."""


def whole_lines() -> None:
    """From now on a line that is printed is written when it ends, and at one go: the launcher mixes what several ranks
    write, and, with PYTHONUNBUFFERED, each of a line's words would be written alone."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


SECONDS = 5.0  # to be heard by the launcher


class StatusLine:
    """Tells the `mpips run` of this machine, where one listens, that this rank is here, and how it ends.

    Who ends without a word has died. The last word is said when all that closes at exit has closed.
    """

    def __init__(self) -> None:
        self._process, self._well, job = os.getpid(), False, launched_as(os.environ)
        self._line = socket.socket(socket.AF_UNIX)
        self._line.settimeout(SECONDS)
        name = os.environ.pop(PRESENCE, "")  # not for the processes that this one starts
        if job and name:
            with suppress(OSError):
                self._line.connect(f"\0{name}")
        self._say(b"%s %d\n" % (PRESENT, job[0] if job else 0))
        atexit.register(self._leave)
        self._in_threads, threading.excepthook = threading.excepthook, self._thread_fails

    def ends_well(self) -> None:
        self._well = True

    def fails(self, code: int = 1) -> None:
        self._say(b"%s %d\n" % (FAILING, code & 255))

    def _leave(self) -> None:
        if self._well:
            self._say(GOODBYE + b"\n")

    def _thread_fails(self, args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, SystemExit):
            self.fails()
        self._in_threads(args)

    def _say(self, word: bytes) -> None:
        if os.getpid() == self._process:  # and no fork of it
            with suppress(OSError):
                self._line.send(word)


if __name__ == "__main__":
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in COMMANDS and not os.path.exists(word):
        print(f"mpips: python -m mpips runs a script, and there is none named {word!r}; the command is `mpips {word}`,"
              f" or `python -m launch.cli {word}`", file=sys.stderr)  # fmt: skip
        sys.exit(2)
    whole_lines()
    status = StatusLine()
    try:
        main()
        status.ends_well()
    except SystemExit as left:
        if left.code:  # now, because an open store would wait at exit for ranks that wait for this one
            why = left.code if isinstance(left.code, str) else ""  # sys.exit("why") means: say why, exit with 1
            code = 1 if why else int(left.code)
            status.fails(code)
            if is_started() or launched_as(os.environ) is None:
                end(f"exit {code}", why and f"{why}\n", code, same=(code, why))
            else:
                print(why, end=why and "\n", file=sys.stderr)
                end_unstarted(f"exit {code}", code)
            raise SystemExit(code) from None
        status.ends_well()
        raise
    except Exception as error:
        status.fails()
        if is_started():
            raise  # to the hook, which says it for all ranks
        sys.excepthook(type(error), error, error.__traceback__)
        end_unstarted(type(error).__name__)
        raise SystemExit(1) from None
