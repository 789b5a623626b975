"""How hypothesis runs: the same examples every time, however slow or busy the machine is; and a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.gpu.arrays import gpu_xp  # noqa: F401

settings.register_profile(
    "mpips", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("mpips")


@pytest.fixture
def full_disk() -> str:
    """A file to which every write fails for want of room."""
    if not Path("/dev/full").is_char_device():
        pytest.skip("no /dev/full here")
    return "/dev/full"
