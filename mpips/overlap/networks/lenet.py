"""The "LeNet-5 with 3.27 M parameters" of the BML paper: two 5 x 5 convolutions on 28 x 28 digits, two dense layers."""

from .table import Builder, Shape, Table, pool


def lenet5() -> Table:
    net = Builder("lenet5")
    x = pool(net.convolution("conv1", Shape(1, 28, 28), 32, 5), 2, 2)
    x = pool(net.convolution("conv2", x, 64, 5), 2, 2)
    net.dense("fc2", net.dense("fc1", x, 1024), 10)
    return net.table()
