"""Run a job: watch its ranks, pass signals on to the job, return its exit code, and clean up after it."""
