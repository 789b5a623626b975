"""Batch, model and hybrid parallel training of multi-layer perceptrons on a process grid.

Source: "Batch, model and integrated parallelism for neural networks", sections 5 to 7 and Algorithms 1 to 3.
"""

from .mlp import MLP

__all__ = ["MLP"]
