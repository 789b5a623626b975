"""One rank of a job: `python -m mpips SCRIPT.py ARGS` or `python -m mpips -m MODULE ARGS`, under any launcher.

As `python -m mpi4py`, which it builds on, but an uncaught exception, or an exit with another code than 0, also names
its rank and ends the whole job at once.
"""

import io
import os
import sys

from mpi4py.run import main

from mpips.ending.last_words import end, end_unstarted, is_started
from mpips.ending.status import StatusLine
from mpips.world import launched_as

COMMANDS = ("run", "doctor", "script", "train", "bench", "tune", "sim", "plan", "lab")
"""Words of the `mpips` command, which are no scripts."""


def whole_lines() -> None:
    """From now on a line that is printed is written when it ends, and at one go: the launcher mixes what several ranks
    write, and, with PYTHONUNBUFFERED, each of a line's words would be written alone."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


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
