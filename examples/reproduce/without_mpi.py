"""Import this before modules that import MPI, in a program that is not a rank: then MPI is not started."""

from __future__ import annotations

import mpi4py

mpi4py.rc.initialize = False
