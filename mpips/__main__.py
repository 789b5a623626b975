"""One rank of a job: `python -m mpips SCRIPT.py ARGS` or `python -m mpips -m MODULE ARGS`, under any launcher.

As `python -m mpi4py`, which it builds on, but an uncaught exception, or an exit with another code than 0, also names
its rank and ends the whole job at once.
"""

from mpi4py.run import main

from mpips.lastwords import end

if __name__ == "__main__":
    try:
        main()
    except SystemExit as left:
        if left.code:  # now, because an open store would wait at exit for ranks that wait for this one
            why = left.code if isinstance(left.code, str) else ""  # sys.exit("why") means: say why, exit with 1
            code = 1 if why else int(left.code)
            end(f"exit {code}", why and f"{why}\n", code, same=(code, why))
            raise SystemExit(code) from None
        raise
