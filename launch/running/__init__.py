"""A job that runs: watch its ranks, pass signals on to it, return its exit code, and leave nothing of it behind."""
