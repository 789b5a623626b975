"""Observe a running job from outside: `gather` reads its ranks' pages, `explain` interprets them, `__main__` prints."""
