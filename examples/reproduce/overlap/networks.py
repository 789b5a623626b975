"""VGG-19, GoogLeNet and Inception-V3 of the papers, layer by layer, and the papers' ways to count layers.

* vgg19: 16 convolutions and 3 dense layers. vgg19-22k is the same with the 21,841 classes of ImageNet22K.
* googlenet: BVLC's Caffe model: nine inception blocks with biases, and two auxiliary heads that training uses.
* inception-v3: for 299 x 299 images, with its auxiliary head. A convolution has no bias and is followed by a
  normalisation.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from mpips.overlap.networks import MODELS as OURS
from mpips.overlap.networks import Builder, CountedLayer, LayerTable, Shape, average, pool


def blocks(table: LayerTable) -> LayerTable:
    """Return the network with each block as one layer, as in BigDL.

    The layers of a block have the same name up to the first "/".
    """
    parts = [tuple(part) for _, part in groupby(table.layers, key=lambda layer: layer.name.split("/")[0])]
    return LayerTable(table.name, tuple(_join(part) for part in parts))


def tensors_apart(table: LayerTable) -> LayerTable:
    """Return the network with every tensor as a layer of its own.

    The first tensor of a layer gets all its parameters and operations. The others (biases, scales) get none.
    """
    parts = [
        layer._replace(name=f"{layer.name} {number}", tensors=1)
        if not number
        else CountedLayer(f"{layer.name} {number}", 0, 1, 0)
        for layer in table.layers
        for number in range(layer.tensors)
    ]
    return LayerTable(table.name, tuple(parts))


def _join(part: tuple[CountedLayer, ...]) -> CountedLayer:
    name = part[0].name.split("/")[0]
    parameters, tensors, flops = (sum(column) for column in list(zip(*part))[1:])
    return CountedLayer(name, parameters, tensors, flops)


def concatenate(*shapes: Shape) -> Shape:
    """Return the shape of branches joined along their channels. Raise ValueError if their sizes differ."""
    if len({shape[1:] for shape in shapes}) != 1:
        raise ValueError(f"branches of different sizes cannot be joined: {shapes}")
    return Shape(sum(shape.channels for shape in shapes), *shapes[0][1:])


# VGG's (channels, convolutions) of each block
_BLOCKS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


def vgg19() -> LayerTable:
    return _vgg("vgg19", 1000)


def vgg19_22k() -> LayerTable:
    return _vgg("vgg19-22k", 21841)


def _vgg(name: str, classes: int) -> LayerTable:
    net, x = Builder(name), Shape(3, 224, 224)
    for block, (channels, repeats) in enumerate(_BLOCKS, 1):
        for repeat in range(1, repeats + 1):
            x = net.convolution(f"conv{block}_{repeat}", x, channels, 3)
        x = pool(x, 2, 2)
    net.dense("fc8", net.dense("fc7", net.dense("fc6", x, 4096), 4096), classes)
    return net.table()


# block -> channels of 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection
_INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
_POOLED_AFTER = ("3b", "4e")
_HEAD_AFTER = ("4a", "4d")


def googlenet(heads: bool = True) -> LayerTable:
    """Return GoogLeNet with both auxiliary heads, as in training, or without, as iBatch counts it."""
    net = Builder("googlenet" if heads else "googlenet-plain")
    x = pool(net.convolution("conv1", Shape(3, 224, 224), 64, 7, stride=2), 3, 2, ceil=True)
    x = net.convolution("conv2/3x3", net.convolution("conv2/reduce", x, 64, 1), 192, 3)
    x = pool(x, 3, 2, ceil=True)
    for name, channels in _INCEPTIONS.items():
        x = _inception(net, name, x, channels)
        if heads and name in _HEAD_AFTER:
            _side_head(net, f"head{name}", x)
        if name in _POOLED_AFTER:
            x = pool(x, 3, 2, ceil=True)
    net.dense("fc", average(x), 1000)
    return net.table()


def _inception(net: Builder, name: str, x: Shape, channels: tuple[int, ...]) -> Shape:
    one, reduce3, three, reduce5, five, projection = channels
    return concatenate(
        net.convolution(f"{name}/1x1", x, one, 1),
        net.convolution(f"{name}/3x3", net.convolution(f"{name}/3x3_reduce", x, reduce3, 1), three, 3),
        net.convolution(f"{name}/5x5", net.convolution(f"{name}/5x5_reduce", x, reduce5, 1), five, 5),
        net.convolution(f"{name}/projection", x, projection, 1),
    )


def _side_head(net: Builder, name: str, x: Shape) -> None:
    x = net.convolution(f"{name}/conv", pool(x, 5, 3), 128, 1)
    net.dense(f"{name}/fc2", net.dense(f"{name}/fc1", x, 1024), 1000)


Kernel = int | tuple[int, int]


def inception_v3() -> LayerTable:
    net = Builder("inception-v3")
    x = _stem(net)
    for name, projection in (("5b", 32), ("5c", 64), ("5d", 64)):
        x = _block_35(net, name, x, projection)
    x = _shrink_to_17(net, "6a", x)
    for name, channels in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        x = _block_17(net, name, x, channels)
    _head(net, x)
    x = _shrink_to_8(net, "7a", x)
    for name in ("7b", "7c"):
        x = _block_8(net, name, x)
    net.dense("fc", average(x), 1000)
    return net.table()


def _chain(net: Builder, name: str, x: Shape, *convolutions: tuple[int, Kernel], last_stride: int = 1) -> Shape:
    """Add convolutions (channels, kernel) one after another. One with a stride is not padded."""
    for i, (channels, kernel) in enumerate(convolutions, 1):
        stride = last_stride if i == len(convolutions) else 1
        x = net.convolution(f"{name}_{i}", x, channels, kernel, stride=stride, padded=stride == 1, normalised=True)
    return x


def _stem(net: Builder) -> Shape:
    x = net.convolution("conv1a", Shape(3, 299, 299), 32, 3, stride=2, padded=False, normalised=True)
    x = net.convolution("conv2a", x, 32, 3, padded=False, normalised=True)
    x = pool(net.convolution("conv2b", x, 64, 3, normalised=True), 3, 2)
    x = net.convolution("conv3b", x, 80, 1, normalised=True)
    return pool(net.convolution("conv4a", x, 192, 3, padded=False, normalised=True), 3, 2)


def _block_35(net: Builder, name: str, x: Shape, projection: int) -> Shape:
    return concatenate(
        _chain(net, f"{name}/1x1", x, (64, 1)),
        _chain(net, f"{name}/5x5", x, (48, 1), (64, 5)),
        _chain(net, f"{name}/3x3_twice", x, (64, 1), (96, 3), (96, 3)),
        _chain(net, f"{name}/pool", x, (projection, 1)),
    )


def _shrink_to_17(net: Builder, name: str, x: Shape) -> Shape:
    return concatenate(
        _chain(net, f"{name}/3x3", x, (384, 3), last_stride=2),
        _chain(net, f"{name}/3x3_twice", x, (64, 1), (96, 3), (96, 3), last_stride=2),
        pool(x, 3, 2),
    )


def _block_17(net: Builder, name: str, x: Shape, c: int) -> Shape:
    wide, tall = (1, 7), (7, 1)
    return concatenate(
        _chain(net, f"{name}/1x1", x, (192, 1)),
        _chain(net, f"{name}/7x7", x, (c, 1), (c, wide), (192, tall)),
        _chain(net, f"{name}/7x7_twice", x, (c, 1), (c, tall), (c, wide), (c, tall), (192, wide)),
        _chain(net, f"{name}/pool", x, (192, 1)),
    )


def _shrink_to_8(net: Builder, name: str, x: Shape) -> Shape:
    return concatenate(
        _chain(net, f"{name}/3x3", x, (192, 1), (320, 3), last_stride=2),
        _chain(net, f"{name}/7x7x3", x, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), last_stride=2),
        pool(x, 3, 2),
    )


def _block_8(net: Builder, name: str, x: Shape) -> Shape:
    one = _chain(net, f"{name}/1x1", x, (320, 1))
    three = _chain(net, f"{name}/3x3", x, (384, 1))
    twice = _chain(net, f"{name}/3x3_twice", x, (448, 1), (384, 3))
    return concatenate(
        one,
        _chain(net, f"{name}/3x3_wide", three, (384, (1, 3))),
        _chain(net, f"{name}/3x3_tall", three, (384, (3, 1))),
        _chain(net, f"{name}/3x3_twice_wide", twice, (384, (1, 3))),
        _chain(net, f"{name}/3x3_twice_tall", twice, (384, (3, 1))),
        _chain(net, f"{name}/pool", x, (192, 1)),
    )


def _head(net: Builder, x: Shape) -> None:
    x = net.convolution("head/conv1", pool(x, 5, 3), 128, 1, normalised=True)
    x = net.convolution("head/conv2", x, 768, 5, padded=False, normalised=True)
    net.dense("head/fc", average(x), 1000)


MODELS: dict[str, Callable[[], LayerTable]] = {
    "lenet5": OURS["lenet5"],
    "googlenet": googlenet,
    "inception-v3": inception_v3,
    "resnet50": OURS["resnet50"],
    "vgg19": vgg19,
    "vgg19-22k": vgg19_22k,
}
