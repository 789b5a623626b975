"""What a network is: sizes, activation, loss, dtype and seed, whoever holds it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from mpips.mlp.network.functions import ACTIVATIONS, LOSSES

DTYPES = ("float32", "float64", "mixed")


class Specification(NamedTuple):
    """Sizes are inputs, hidden widths, outputs; the seed fixes the weights.

    dtype: "float32", "float64", or "mixed": float32 weights, sums and state, while what ranks send each other between
    nodes is float16, under a loss scale (Micikevicius et al., Mixed precision training, 2018).
    """

    sizes: tuple[int, ...]
    activation: str
    loss: str
    dtype: str
    seed: int


def working_dtype(dtype: str) -> np.dtype:
    """The dtype of weights, activations and data in a network of this `dtype`."""
    return np.dtype("float32" if dtype == "mixed" else dtype)


def check(specification: Specification) -> None:
    """Raise ValueError, naming the argument and the choices, unless such a network can be made."""
    sizes, activation, loss, dtype, _ = specification
    if len(sizes) < 2 or any(size < 1 for size in sizes):
        raise ValueError(f"sizes {list(sizes)} must be inputs, hidden widths, outputs: at least two, all at least 1")
    for value, known, what in ((activation, ACTIVATIONS, "activation"), (loss, LOSSES, "loss")):
        if value not in known:
            raise ValueError(f"{what} {value!r} is unknown; choose one of {', '.join(known)}")
    if str(dtype) not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")
