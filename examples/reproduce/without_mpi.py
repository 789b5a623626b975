"""Imported by a driver before what brings MPI with it: the driver is no rank, and starts no MPI."""

from __future__ import annotations

import mpi4py

mpi4py.rc.initialize = False
