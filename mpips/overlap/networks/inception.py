"""Inception-V3 on 299 x 299 images with its auxiliary head; convolutions without bias, each then normalised."""

from __future__ import annotations

from .table import Builder, Shape, Table, average, concatenate, pool

Kernel = int | tuple[int, int]


def inception_v3() -> Table:
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
    """Convolutions (channels, kernel) in a row; one with a stride is not padded."""
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
