"""A network's layer table: parameters and floating-point operations, counted while it is spelled out."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from ..profile import Network, Profile, create_profile

BACKWARD_PER_FORWARD = 2.0
"""Backward computes two products (gradients of inputs and of weights) where forward computes one."""


class CountedLayer(NamedTuple):
    """One learnable layer: what its gradients weigh, and the operations of its forward pass on one example.

    A multiplication with an addition counts as two operations; normalisation as two an element. Biases, pooling and
    activations are left out.
    """

    name: str
    parameters: int
    tensors: int
    flops: int


class Shape(NamedTuple):
    """What flows between layers."""

    channels: int
    height: int
    width: int


class Table(NamedTuple):
    """A network's learnable layers in forward order."""

    name: str
    layers: tuple[CountedLayer, ...]

    @property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.layers)

    @property
    def tensors(self) -> int:
        return sum(layer.tensors for layer in self.layers)

    @property
    def flops(self) -> int:
        return sum(layer.flops for layer in self.layers)

    def blocks(self) -> Table:
        """The same network with each block (layers of one name up to the first "/") as one layer, as in BigDL."""
        parts = [tuple(part) for _, part in groupby(self.layers, key=lambda layer: layer.name.split("/")[0])]
        return Table(self.name, tuple(_join(part) for part in parts))

    def tensors_apart(self) -> Table:
        """The same network with every tensor by itself, as where each is a message: a layer's first has its parameters
        and operations, the others (biases, scales) are there but weigh nothing."""
        parts = [
            layer._replace(name=f"{layer.name} {number}", tensors=1) if not number
            else CountedLayer(f"{layer.name} {number}", 0, 1, 0)
            for layer in self.layers
            for number in range(layer.tensors)
        ]  # fmt: skip
        return Table(self.name, tuple(parts))

    def profile(
        self,
        rate: float,
        batch: int,
        network: Network,
        startup_s: float,
        bandwidth_Bps: float,
    ) -> Profile:
        """Compute times of a device that sustains `rate` floating-point operations a second, on `batch` examples."""
        forward = [layer.flops * batch / rate for layer in self.layers]
        return create_profile(
            [layer.name for layer in self.layers],
            [layer.parameters for layer in self.layers],
            forward,
            [BACKWARD_PER_FORWARD * seconds for seconds in forward],
            network,
            startup_s,
            bandwidth_Bps,
        )


def _join(part: tuple[CountedLayer, ...]) -> CountedLayer:
    name = part[0].name.split("/")[0]
    parameters, tensors, flops = (sum(column) for column in list(zip(*part))[1:])
    return CountedLayer(name, parameters, tensors, flops)


class Builder:
    """Collects layers; each call returns the shape that it produces."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.layers: list[CountedLayer] = []

    def convolution(
        self,
        name: str,
        x: Shape,
        channels: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padded: bool = True,
        normalised: bool = False,
    ) -> Shape:
        """kernel: square, or (height, width). padded: by kernel // 2. normalised: no bias; a normalisation follows."""
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        weights = height * width * x.channels * channels
        out = Shape(
            channels,
            _out(x.height, height, stride, height // 2 if padded else 0),
            _out(x.width, width, stride, width // 2 if padded else 0),
        )
        pixels = out.height * out.width
        bias = 0 if normalised else channels
        self.layers.append(CountedLayer(name, weights + bias, 1 if normalised else 2, 2 * weights * pixels))
        if normalised:
            self.layers.append(CountedLayer(f"{name}/norm", 2 * channels, 2, 2 * channels * pixels))
        return out

    def dense(self, name: str, x: Shape, units: int) -> Shape:
        weights = x.channels * x.height * x.width * units
        self.layers.append(CountedLayer(name, weights + units, 2, 2 * weights))
        return Shape(units, 1, 1)

    def table(self) -> Table:
        return Table(self.name, tuple(self.layers))


def pool(x: Shape, kernel: int, stride: int, padding: int = 0, ceil: bool = False) -> Shape:
    """Shape after pooling; `ceil` rounds up, as Caffe does."""
    return Shape(x.channels, *(_out(size, kernel, stride, padding, ceil) for size in (x.height, x.width)))


def average(x: Shape) -> Shape:
    """Global average pooling."""
    return Shape(x.channels, 1, 1)


def concatenate(*shapes: Shape) -> Shape:
    """Branches joined along the channels; their sizes must agree."""
    if len({shape[1:] for shape in shapes}) != 1:
        raise ValueError(f"branches of different sizes cannot be joined: {shapes}")
    return Shape(sum(shape.channels for shape in shapes), *shapes[0][1:])


def _out(size: int, kernel: int, stride: int, padding: int, ceil: bool = False) -> int:
    return (size + 2 * padding - kernel + (stride - 1 if ceil else 0)) // stride + 1
