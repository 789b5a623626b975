"""A model in layers: what it offers so that its exchange can go on beside its compute, and how its arrays are laid out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

Hook = Callable[[int], Any]
"""What a model calls at a layer, with the layer's number from 0."""
ARRAYS = ("flat_parameters", "flat_gradients", "layer_elements")
HOOKS = ("before", "ready")


class LayeredModel(Protocol):
    """A model whose layers lie one after the other in flat arrays, and which tells when it comes to each.

    The arrays are 1-D, C-contiguous, of one dtype, and stay where they are: `lay_out` makes them, with views in the
    layers' own shapes. Layers are in forward order; their numbers in the hooks count from 0.
    """

    @property
    def flat_parameters(self) -> np.ndarray: ...

    @property
    def flat_gradients(self) -> np.ndarray: ...

    @property
    def layer_elements(self) -> Sequence[int]:
        """Parameters of each layer, at least one."""
        ...

    def loss_and_gradients(
        self, x: np.ndarray, y: np.ndarray, before: Hook | None = None, ready: Hook | None = None
    ) -> float:
        """Forward and backward; the loss. `before(layer)`, in ascending order: its parameters come next.
        `ready(layer)`, in descending order: its gradients are there, and its parameters may be overwritten. Without
        hooks it is what any model of a Trainer has."""
        ...


def lay_out(
    layers: Sequence[Sequence[Sequence[int]]],
    dtype: str = "float32",
    empty: Callable[[int, str], np.ndarray] = np.empty,
) -> tuple[np.ndarray, list[list[np.ndarray]], list[int]]:
    """A flat array for the arrays of all layers, views of it in these shapes, and the elements of each layer.

    `layers` has the shapes of the arrays of every layer, as [[(20, 64), (20,)], [(10, 20), (10,)]]. `empty` makes the
    flat array: `mpips.empty` in memory that the ranks of a node share. What is in it is undefined.
    """
    elements = [sum(int(np.prod(shape)) for shape in shapes) for shapes in layers]
    flat = empty(sum(elements), dtype)
    views: list[list[np.ndarray]] = []
    at = 0
    for shapes in layers:
        views.append([])
        for shape in shapes:
            size = int(np.prod(shape))
            views[-1].append(flat[at : at + size].reshape(shape))
            at += size
    return flat, views, elements


def check_model(model: object, what: str) -> None:
    """ValueError that says what the model lacks of `LayeredModel`; `what` needs one, as "overlap='auto'"."""
    lacks = [name for name in (*ARRAYS, "loss_and_gradients") if not hasattr(model, name)]
    faults = [f"has no {', '.join(lacks)}"] if lacks else []
    step = getattr(model, "loss_and_gradients", None)
    hooks = [name for name in HOOKS if step is not None and not _takes(step, name)]
    faults += [f"calls no {' and no '.join(hooks)} in loss_and_gradients"] if hooks else []
    faults += _misfits(model) if not lacks else []
    if faults:
        raise ValueError(f"{what} needs a model in layers, but {type(model).__name__} "
                         f"{'; it '.join(faults)} (docs/how-to/overlap.md shows how to write one)")


def _takes(call: Any, name: str) -> bool:
    parameters = inspect.signature(call).parameters.values()
    return any(each.name == name or each.kind is each.VAR_KEYWORD for each in parameters)


def _misfits(model: Any) -> list[str]:
    """What is wrong with the arrays."""
    sizes = {name: np.size(getattr(model, name)) for name in ARRAYS[:2]}
    wanted, shown = sum(model.layer_elements), ", ".join(f"{name} {size}" for name, size in sizes.items())
    wrong = [f"has {wanted} elements in layer_elements, but {shown}"] if set(sizes.values()) != {wanted} else []
    if not len(model.layer_elements) or min(model.layer_elements) < 1:
        wrong.append("has a layer without parameters in layer_elements: count it with the layer before")
    for name in ARRAYS[:2]:
        array = getattr(model, name)
        if array.ndim != 1 or not array.flags.c_contiguous:
            wrong.append(f"has a {name} that is not 1-D and contiguous")
    dtypes = {name: getattr(model, name).dtype for name in ARRAYS[:2]}
    if len(set(dtypes.values())) > 1:
        wrong.append(f"has {' but '.join(f'{dtype} in {name}' for name, dtype in dtypes.items())}: give both one dtype")
    return wrong
