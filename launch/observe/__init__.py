"""A job seen from outside: `gather` reads the pages of its ranks, `explain` says what they mean, `command` shows it."""
