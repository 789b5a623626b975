"""Allreduce on one node, compared with Open MPI, MPICH, Intel MPI and gloo."""
