"""Settings of all tests: one BLAS thread for each process, and the mark `core`."""

from __future__ import annotations

import os
from collections import Counter

import pytest

# Ranks share the cores, so each gets one BLAS thread. NumPy reads these variables when it is imported.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")


# tryfirst: pytest must see the added marks when it selects tests by their marks.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all but the first `count` cases of a test marked `core(count)` as slow, so that `make test` skips them."""
    counts = Counter[str]()
    for item in items:
        core = item.get_closest_marker("core")
        if core is not None and item.get_closest_marker("full") is None:
            test = item.nodeid.partition("[")[0]
            counts[test] += 1
            if counts[test] > core.args[0]:
                item.add_marker("slow")
