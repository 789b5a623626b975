"""The strategies that look at nothing but the number of layers: what the papers compare theirs with.

* sequential: the default parameter server (iBatch, figure 4a). It pulls everything, then computes everything; it
  computes everything, then pushes everything. One startup a direction, and nothing overlaps.
* single: SyncEASGD's single-layer communication (MG-WFBP, section I). All gradients are merged, and sent once after the
  backward pass. As a partition it is `sequential`: the papers differ only in who exchanges the message, an allreduce or
  a server.
* layerwise: one message a layer, as in wait-free backpropagation (MG-WFBP, section II.C) and iBatch's layer by layer
  (figure 4b).
"""

from mpips.overlap.problem import Groups, Problem


def sequential(problem: Problem) -> Groups:
    """One message."""
    return ((1, problem.layers),)


def single(problem: Problem) -> Groups:
    """One message."""
    return sequential(problem)


def layerwise(problem: Problem) -> Groups:
    """One message a layer."""
    return tuple((layer, layer) for layer in range(1, problem.layers + 1))
