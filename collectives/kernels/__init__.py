"""Compiled kernels: small loops over arrays, compiled by Numba. Without Numba, NumPy computes the same bits."""
