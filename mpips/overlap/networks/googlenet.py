"""GoogLeNet as BVLC's Caffe model: nine inception blocks with biases, and two auxiliary heads used in training."""

from .table import Builder, Shape, Table, average, concatenate, pool

# Channels of 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection.
_BLOCKS = {
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


def googlenet(heads: bool = True) -> Table:
    """With both auxiliary heads as in training, or without, as the model is used (and as iBatch counts it)."""
    net = Builder("googlenet" if heads else "googlenet-plain")
    x = pool(net.convolution("conv1", Shape(3, 224, 224), 64, 7, stride=2), 3, 2, ceil=True)
    x = net.convolution("conv2/3x3", net.convolution("conv2/reduce", x, 64, 1), 192, 3)
    x = pool(x, 3, 2, ceil=True)
    for name, channels in _BLOCKS.items():
        x = _inception(net, name, x, channels)
        if heads and name in _HEAD_AFTER:
            _head(net, f"head{name}", x)
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


def _head(net: Builder, name: str, x: Shape) -> None:
    x = net.convolution(f"{name}/conv", pool(x, 5, 3), 128, 1)
    net.dense(f"{name}/fc2", net.dense(f"{name}/fc1", x, 1024), 1000)
