"""One message a layer: wait-free backpropagation (MG-WFBP, section II.C) and iBatch's layer by layer (figure 4b)."""

from ..stage import Groups, Stage


def partition(problem: Stage) -> Groups:
    return tuple((layer, layer) for layer in range(1, problem.layers + 1))
