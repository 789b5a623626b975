"""One rank of a job: `python -m mpips SCRIPT.py ARGS` or `python -m mpips -m MODULE ARGS`, under any launcher.

As `python -m mpi4py`, which it builds on, but an uncaught exception also names its rank before it ends the whole job.
"""

from mpi4py.run import main

from mpips.processes import install_hooks

if __name__ == "__main__":
    install_hooks()
    main()
