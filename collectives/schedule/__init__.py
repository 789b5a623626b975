"""Algorithms as data: which rank sends which chunk to which rank in which step. One file each; see `catalog`."""
