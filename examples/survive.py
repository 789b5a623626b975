"""Synchronous SGD that goes on when processes are killed, and notes its accuracy for `mpips chaos`.

mpips chaos --faults 3 --every 10 --reference --picture out.png -- \\
    mpips run --servers 2 --workers 4 --spares 3 examples/survive.py --epochs 30 --sample-seconds 0.004

A gradient depends on parameters, step, rank and number of workers alone. So a spare in a dead worker's place computes
what that would have computed, and the curve has the same bits.
"""

import time

import numpy as np

import mpips
from task import Network, Settings, digits, settings


class Batches:
    """The mini-batches of a training run, each by its step; every epoch has another order."""

    def __init__(self, options: Settings) -> None:
        self.x, self.y, self.test_x, self.test_y = digits(options.dtype)
        self.size, self.seed, self.epochs = options.batch_size, options.seed, options.epochs

    def steps(self, workers: int) -> int:
        """Steps of all epochs."""
        return self.epochs * self._of_epoch(workers)

    def at(self, step: int, rank: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
        """x and y of a worker in a step."""
        epoch, turn = divmod(step, self._of_epoch(workers))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.x))
        start = (turn * workers + rank) * self.size
        rows = order[start : start + self.size]
        return self.x[rows], self.y[rows]

    def _of_epoch(self, workers: int) -> int:
        return len(self.x) // (self.size * workers)


def one_step(options: Settings, batches: Batches, model: Network, kv: mpips.KVStore, step: int) -> None:
    """Gradients of this worker's batch to the servers, parameters back."""
    mpips.chaos.note(step, model.accuracy(batches.test_x, batches.test_y))
    x, y = batches.at(step, kv.rank, kv.num_workers)
    model.forward(x)
    model.backward(y)
    time.sleep(options.sample_seconds * len(x))
    kv.push(model.names, model.gradients)
    kv.pull(model.names, model.parameters)


def main(options: Settings) -> float:
    kv = mpips.create(options.kind)
    batches = Batches(options)
    model = Network(batches.x.shape[1], options.hidden, 10, options.dtype, options.seed)
    keys, parameters = model.names, model.parameters
    rate, rescale = options.learning_rate, 1 / kv.num_workers
    step = kv.resumed
    while True:
        try:
            kv.init(keys, parameters)
            kv.set_optimizer("sgd", learning_rate=rate, momentum=options.momentum, rescale=rescale)
            kv.pull(keys, parameters)
            while step < batches.steps(kv.num_workers):
                one_step(options, batches, model, kv, step)
                step += 1
            accuracy = model.accuracy(batches.test_x, batches.test_y)
            rank = kv.rank
            kv.close()
            break
        except mpips.StoreError:
            step = kv.recover().step
    if rank == 0:
        print(f"test accuracy {accuracy:.3f} after {step} steps")
    return accuracy


if __name__ == "__main__":
    main(settings("dist_sync", "mpi_sync"))
