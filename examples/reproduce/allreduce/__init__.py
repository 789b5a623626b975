"""allreduce on one node beside the calls of Open MPI, MPICH and Intel MPI, and beside gloo."""
