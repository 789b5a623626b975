"""Fixtures that every test may use."""

from __future__ import annotations

import os

# Ranks share the cores: one BLAS thread each, set before NumPy loads.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
