"""Compiled models train as others do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'mpips[torch]'")

import mpips.torch  # noqa: E402
from tests.mpi.torch.support import batch, far, groups, network, nn, train, worst  # noqa: E402


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, mpips.torch.DataParallel])
def test_a_compiled_model_trains_alike(wrap: Callable[[nn.Module], nn.Module]) -> None:
    with groups():
        made = []
        for compiled in (False, True):
            model = wrap(network())
            step = torch.compile(model, backend="aot_eager") if compiled else model
            train(step, torch.optim.SGD(model.parameters(), 0.1), 5, batch)
            made.append(model)
        assert worst(far(*made)) < 1e-12
