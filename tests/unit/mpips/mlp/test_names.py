"""What `mpips.mlp` offers, and what it loads for it."""

import subprocess
import sys

import pytest

from mpips import mlp


def test_a_shell_completes_public_names_alone_and_each_is_there():
    assert dir(mlp) == sorted(mlp.__all__)
    assert all(getattr(mlp, name) is not None for name in dir(mlp))


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Grid'"):
        mlp.Grid  # noqa: B018


def test_the_serial_network_needs_no_mpi():
    code = (
        "import sys, numpy as np; from mpips.mlp import MLP; "
        "MLP([3, 4, 2]).loss_and_gradients(np.ones((5, 3), 'f4'), np.ones((5, 2), 'f4')); "
        "print([name for name in sys.modules if name.startswith('mpi4py')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
