"""The default parameter server (iBatch, figure 4a): one message, and nothing overlaps.

Pull everything, compute everything; compute everything, push everything. One startup a direction.
"""

from ..stage import Groups, Stage


def partition(problem: Stage) -> Groups:
    return ((1, problem.layers),)
