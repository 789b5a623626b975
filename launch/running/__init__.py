"""A job that runs: its ranks are heard, signals reach them, its exit code comes back, and nothing of it is left."""
