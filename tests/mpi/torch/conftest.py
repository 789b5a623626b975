"""These tests are skipped where PyTorch is not installed: it is an extra."""

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'mpips[torch]'", exc_type=ImportError)
