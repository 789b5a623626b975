"""Algorithms as data: which rank sends which chunk to which rank in which step. Each has a file; see `catalog`."""
