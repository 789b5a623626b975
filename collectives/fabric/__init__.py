"""Shared memory for arrays, the board on which ranks of a node wait for each other, MPI requests, and the wait loop."""
