"""SyncEASGD's single-layer communication (MG-WFBP, section I): all gradients merged, sent once after the backward pass.

As a partition it is `sequential`'s; the papers differ only in who exchanges the message (an allreduce, or a server).
"""

from ..stage import Groups, Stage


def partition(problem: Stage) -> Groups:
    return ((1, problem.layers),)
