"""Vectors on GPUs, through CuPy; imported only when an array lives on a device.

What has run on which card is written in docs/performance.md; what no GPU has confirmed is marked there.
"""

from collectives.cuda.vectors import CudaVectors

__all__ = ["CudaVectors"]
