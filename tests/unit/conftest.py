"""How hypothesis runs: the same examples every time, however slow or busy the machine is; a full disk; and no compiler
beside a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


@pytest.fixture(autouse=True)
def no_compiler() -> Iterator[None]:
    """Let a thread that compiles come to its end before the next test: Numba records warnings while it compiles, which
    Python does for all threads at once, so that a test which looks for a warning would not find it."""
    yield
    engine = sys.modules.get("mpips.collectives.kernels.engine")
    if engine is not None and engine.in_use():
        engine.settle(60.0)
