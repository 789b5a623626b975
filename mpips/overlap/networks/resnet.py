"""ResNet-50: bottleneck blocks (3, 4, 6, 3), every convolution without bias and followed by a normalisation.

The stride of a block sits in its 3 x 3 convolution, as in today's implementations; the parameters do not depend on it.
"""

from .table import Builder, Shape, Table, average, pool

_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
_EXPANSION = 4


def resnet50() -> Table:
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
