"""Compiled kernels: small loops over arrays, by Numba where it is there; NumPy gives the same bits where it is not."""
