"""What the ranks must have said alike before they train together: each argument by name, as `alike` compares them."""

from __future__ import annotations

import zlib
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI

from mpips.optimizers import Optimizer

from .agreement import alike
from .communication import on_host
from .specification import Specification

if TYPE_CHECKING:
    from .data import Data
    from .hybrid import Hybrid
    from .mlp import MLP


def of_network(specification: Specification) -> dict[str, object]:
    """The arguments of an MLP."""
    return {
        "the network": "-".join(str(size) for size in specification.sizes), "activation": specification.activation,
        "loss": specification.loss, "dtype of the network": specification.dtype,
        "seed of the network": specification.seed,
    }  # fmt: skip


def of_optimizer(optimizer: Optimizer) -> dict[str, object]:
    """Its kind and options."""
    options = {f"{field.name} of the optimizer": getattr(optimizer, field.name) for field in fields(optimizer)}
    return {"the optimizer": type(optimizer).__name__, **options}


def of_data(data: Data) -> dict[str, object]:
    """What `load` made of its arguments and the rows, as far as it is the same on every rank."""
    return {
        "batch of the data": data.batch, "seed of the data": data.seed, "grid of the data": data.grid,
        "dtype of the data": data.x.dtype, "features of the data": data.x.shape[1], "outputs of the data": data.outputs,
        "classes of the data": data.classes, "training rows": data.train_rows, "test rows": data.test_rows,
    }  # fmt: skip


def of_past(hybrid: Hybrid | None) -> dict[str, object]:
    """What training goes on from."""
    if hybrid is None:
        return {"hybrid": "not given"}
    past = {f"{name} so far": value for name, value in of_optimizer(hybrid.optimizer).items()}
    network = {f"{name} so far": value for name, value in of_network(hybrid.network.specification).items()}
    return {
        "hybrid": "given", "updates so far": hybrid.updates, "mode so far": hybrid.network.mode, **past, **network
    }  # fmt: skip


def check_weights(model: MLP, comm: MPI.Comm) -> None:
    """Refuse, on every rank, first weights that differ: where any rank has used its arrays, all must hold the same.

    Collective. Where no rank has, the seed alone decides, and no rank makes arrays of the whole network.
    """
    used = np.array([model.used], np.int64)
    comm.Allreduce(MPI.IN_PLACE, used, MPI.MAX)
    if used[0]:
        weights = np.ascontiguousarray(on_host(model.flat_parameters))
        alike(comm, "train", {"checksum of the network's weights": f"{zlib.crc32(weights.data):08x}"})
