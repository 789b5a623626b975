"""Algorithms as data: who sends which chunk to whom in which step. One algorithm a file, named in `catalog`."""
