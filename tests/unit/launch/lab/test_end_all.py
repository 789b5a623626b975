"""Processes that a job left behind are found by their environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

from launch.lab import job

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_jobs_processes_end_and_no_others():
    mine = uuid.uuid4().hex
    own = subprocess.Popen(SLEEP, env={**os.environ, job.MARK_VARIABLE: mine}, start_new_session=True)
    others = [
        subprocess.Popen(SLEEP, env={**os.environ, job.MARK_VARIABLE: mine + "0"}),
        subprocess.Popen(SLEEP),
    ]
    try:
        assert job.end_all(mine) == 1
        assert own.wait(10) == -signal.SIGKILL
        assert [other.poll() for other in others] == [None, None]
        assert job.end_all(mine) == 0
    finally:
        for process in (own, *others):
            process.kill()
            process.wait()
