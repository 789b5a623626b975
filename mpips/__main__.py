"""One rank of a job: `python -m mpips SCRIPT.py ARGS` or `python -m mpips -m MODULE ARGS`, under any launcher.

As `python -m mpi4py`, which it builds on, but an uncaught exception, or an exit with another code than 0, also names
its rank and ends the whole job at once.
"""

import sys

from mpi4py.run import main

from mpips.processes import abort, install_hooks

if __name__ == "__main__":
    install_hooks()
    try:
        main()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):  # sys.exit("why") means: say why, exit with 1
            print(code, file=sys.stderr)
            code = 1
        if code:  # now, because an open store would wait at exit for ranks that wait for this one
            abort(f"exit {code}", code)
        raise
