"""A job seen from outside: `gather` reads its ranks' pages, `explain` says what they mean, `__main__` shows it."""
