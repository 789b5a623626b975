"""VGG-19 (16 convolutions, 3 dense layers), and VGG19-22K, the same with the 21,841 classes of ImageNet22K."""

from .table import Builder, Shape, Table, pool

_BLOCKS = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))


def vgg19() -> Table:
    return _vgg("vgg19", 1000)


def vgg19_22k() -> Table:
    return _vgg("vgg19-22k", 21841)


def _vgg(name: str, classes: int) -> Table:
    net, x = Builder(name), Shape(3, 224, 224)
    for block, (channels, repeats) in enumerate(_BLOCKS, 1):
        for repeat in range(1, repeats + 1):
            x = net.convolution(f"conv{block}_{repeat}", x, channels, 3)
        x = pool(x, 2, 2)
    net.dense("fc8", net.dense("fc7", net.dense("fc6", x, 4096), 4096), classes)
    return net.table()
