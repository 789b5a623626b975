"""Run a job: watch its ranks, pass signals on to it, return its exit code, and clean up after it."""
