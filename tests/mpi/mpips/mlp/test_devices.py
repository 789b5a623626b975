"""Training on arrays of another module (as strict as CuPy, but on the host) gives the same numbers on every mesh."""

import numpy as np
import pytest

from mpips.mlp import MLP, Mesh, SyntheticSource, TrainingError, collect, load, train
from mpips.mlp.mesh import factorings
from mpips.mlp.train_options import array_module
from mpips.optimizers import SGD
from tests.gpu.arrays import CARD, card_is_here
from tests.mpi.sizes import either_mpi, only_on
from tests.unit.mpips.mlp.device import module

from .support import COMM, MESHES, curve, same_everywhere

pytestmark = MESHES


@either_mpi
@only_on(1, 2, 3, 4)
@pytest.mark.parametrize("dtype", ["float64", "mixed"])
@pytest.mark.parametrize("mode", ["pairs", "columns"])
@pytest.mark.parametrize("arrays", ["strict", CARD])
def test_another_array_module_takes_the_same_steps_on_every_mesh(arrays, mode, dtype):
    if arrays == "cupy" and not card_is_here():
        pytest.skip("needs CuPy and a GPU")
    other = module if arrays == "strict" else array_module("gpu", COMM)
    ok = []
    for shape in factorings(COMM.size):
        found = []
        for xp in (np, other):
            mesh = Mesh(*shape)
            data = load(lambda: SyntheticSource(100, 5, 3), mesh, 40, dtype, seed=1)
            model = MLP([5, 12, 11, 10, 3], dtype=dtype, seed=3, xp=xp)
            trained = train(model, data, mesh, 2, SGD(learning_rate=0.05, momentum=0.5), mode, half=True)
            found.append((curve(trained), collect(trained.worker).flat_parameters.copy()))
            mesh.free()
        ok += [np.abs(a - b).max() <= (1e-12 if dtype == "float64" else 1e-3) for a, b in zip(*found)]
    assert same_everywhere(all(ok)), ok


def test_a_gpu_that_is_not_there_is_refused_on_every_rank_in_the_same_words():
    try:
        import cupy  # noqa: F401
    except ImportError:
        with pytest.raises(TrainingError, match="rank 0: device gpu needs CuPy"):
            array_module("gpu", COMM)
    else:
        pytest.skip("CuPy is installed")
