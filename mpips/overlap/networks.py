"""Networks as lists of layers, with the number of parameters and operations of each layer.

* lenet5: the "LeNet-5 with 3.27 M parameters" of the BML paper: two 5 x 5 convolutions on 28 x 28 digits, two dense
  layers.
* resnet50: bottleneck blocks (3, 4, 6, 3). A convolution has no bias and is followed by a normalisation. The stride of
  a block is in its 3 x 3 convolution, as in today's implementations; the stride does not affect the number of
  parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mpips.overlap.problem import Network, Profile, create_profile

# Backward computes two products (gradients of inputs and of weights) where forward computes one.
BACKWARD_PER_FORWARD = 2.0


class CountedLayer(NamedTuple):
    """One learnable layer: the number of its parameters, and the operations of its forward pass on one example.

    `tensors` is the number of arrays that hold the parameters. A multiplication with an addition counts as two
    operations, a normalisation as two operations for each element. Biases, pooling and activations are left out.
    """

    name: str
    parameters: int
    tensors: int
    flops: int


class Shape(NamedTuple):
    """The shape of the data between two layers."""

    channels: int
    height: int
    width: int


class LayerTable(NamedTuple):
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

    def profile(
        self,
        rate: float,
        batch: int,
        network: Network,
        startup_s: float,
        bandwidth_Bps: float,
    ) -> Profile:
        """Return the profile on a device that computes `rate` floating-point operations a second.

        `batch` is the number of examples in an iteration.
        """
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


class Builder:
    """Collects the layers of a network. Each call adds a layer and returns the shape of the layer's output."""

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
        """Add a convolution.

        Args:
            kernel: The size of a square, or (height, width).
            padded: Pad by kernel // 2.
            normalised: The convolution has no bias and is followed by a normalisation.
        """
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

    def table(self) -> LayerTable:
        return LayerTable(self.name, tuple(self.layers))


def pool(x: Shape, kernel: int, stride: int, padding: int = 0, ceil: bool = False) -> Shape:
    """Return the shape after pooling. `ceil` rounds up, as Caffe does."""
    return Shape(x.channels, *(_out(size, kernel, stride, padding, ceil) for size in (x.height, x.width)))


def average(x: Shape) -> Shape:
    """Return the shape after global average pooling."""
    return Shape(x.channels, 1, 1)


def _out(size: int, kernel: int, stride: int, padding: int, ceil: bool = False) -> int:
    return (size + 2 * padding - kernel + (stride - 1 if ceil else 0)) // stride + 1


def lenet5() -> LayerTable:
    net = Builder("lenet5")
    x = pool(net.convolution("conv1", Shape(1, 28, 28), 32, 5), 2, 2)
    x = pool(net.convolution("conv2", x, 64, 5), 2, 2)
    net.dense("fc2", net.dense("fc1", x, 1024), 10)
    return net.table()


_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
_EXPANSION = 4


def resnet50() -> LayerTable:
    net = Builder("resnet50")
    x = net.convolution("conv1", Shape(3, 224, 224), 64, 7, stride=2, normalised=True)
    x = pool(x, 3, 2, padding=1)
    for stage, (channels, blocks, stride) in enumerate(_STAGES, 2):
        for block in range(1, blocks + 1):
            x = _bottleneck(net, f"stage{stage}_{block}", x, channels, stride if block == 1 else 1)
    net.dense("fc", average(x), 1000)
    return net.table()


def _bottleneck(net: Builder, name: str, x: Shape, channels: int, stride: int) -> Shape:
    inner = net.convolution(f"{name}/1x1", x, channels, 1, normalised=True)
    inner = net.convolution(f"{name}/3x3", inner, channels, 3, stride=stride, normalised=True)
    out = net.convolution(f"{name}/expand", inner, _EXPANSION * channels, 1, normalised=True)
    if x != out:
        net.convolution(f"{name}/shortcut", x, _EXPANSION * channels, 1, stride=stride, normalised=True)
    return out


# name -> function that makes the table. The other networks of the papers are in examples/reproduce/overlap.
MODELS: dict[str, Callable[[], LayerTable]] = {"lenet5": lenet5, "resnet50": resnet50}
