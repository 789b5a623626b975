"""Tests of PyTorch's and JAX's users: where PyTorch is not installed, each of these files is skipped."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'mpips[torch]'")
