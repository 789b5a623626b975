"""The network and its optimizers on another array module, one that is as strict as CuPy. A real GPU is not tested."""

import numpy as np
import pytest

from mpips.mlp import MLP
from mpips.optimizers import SGD, Adam, AdamW, RMSProp

from .device import Array, module
from .test_mlp import problem


@pytest.mark.parametrize("loss", ["l2", "softmax"])
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.5, weight_decay=0.01), Adam(), AdamW(), RMSProp(rescale=0.5)])
def test_a_network_on_a_device_takes_the_same_steps(loss, optimizer):
    x, y = problem(loss, 20, 5, 3)
    weights = []
    for xp in (np, module):
        mlp = MLP([5, 7, 3], "tanh", loss, "float64", seed=2, xp=xp)
        state = optimizer.init(mlp.flat_parameters)
        losses = []
        for step in range(1, 4):
            losses.append(mlp.loss_and_gradients(*((x, y) if xp is np else (module.asarray(x), module.asarray(y)))))
            optimizer.update(mlp.flat_parameters, mlp.flat_gradients, state, step)
        weights.append((mlp.flat_parameters if xp is np else mlp.flat_parameters.get(), losses))
    np.testing.assert_array_equal(weights[0][0], weights[1][0])
    assert weights[0][1] == weights[1][1]


def test_predictions_and_accuracy_on_a_device():
    x, y = problem("softmax", 30, 4, 3)
    here = MLP([4, 6, 3], loss="softmax", dtype="float64", seed=2)
    there = MLP([4, 6, 3], loss="softmax", dtype="float64", seed=2, xp=module)
    on_device = module.asarray(x)
    np.testing.assert_array_equal(here.predict(x), there.predict(on_device).get())
    assert here.accuracy(x, y) == there.accuracy(on_device, module.asarray(y))


def test_the_pretended_device_is_as_strict_as_cupy():
    device = module.asarray(np.ones(3))
    with pytest.raises(TypeError, match="Unsupported"):
        np.add(device, np.ones(3))
    with pytest.raises(TypeError, match="Unsupported"):
        device[...] = np.ones(3)
    assert isinstance(np.exp(device, out=module.empty(3)), Array)
