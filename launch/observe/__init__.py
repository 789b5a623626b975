"""Observe a running job from outside: `gather` reads the pages of its ranks, `explain` interprets them.

The *page* of a rank is a small file in the machine's memory, in which the rank writes what it does. `__main__` has the
commands.
"""
