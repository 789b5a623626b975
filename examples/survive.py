"""Synchronous SGD that survives killed processes, and records its accuracy for `mpips chaos`.

mpips chaos --faults 3 --every 10 --reference --picture out.png -- \\
    mpips run --servers 2 --workers 4 --spares 3 examples/survive.py --epochs 30 --sample-seconds 0.004

A gradient depends only on the parameters, the step, the rank and the number of workers. So a spare that replaces a dead
worker computes the gradient that the dead worker would have computed. Deaths do not change a bit of the curve.
"""

import time

import numpy as np

import mpips
from task import Network, Settings, digits, parse_settings


class Batches:
    """The batches of a training run. The images are shuffled in every epoch."""

    def __init__(self, options: Settings) -> None:
        self.x, self.y, self.test_x, self.test_y = digits(options.dtype)
        self.size = options.batch_size
        self.seed = options.seed
        self.epochs = options.epochs

    def steps(self, workers: int) -> int:
        """Return the number of steps of all epochs."""
        return self.epochs * self._steps_per_epoch(workers)

    def at(self, step: int, rank: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
        """Return x and y of a worker's batch in a step."""
        epoch, step_of_epoch = divmod(step, self._steps_per_epoch(workers))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.x))
        start = (step_of_epoch * workers + rank) * self.size
        rows = order[start : start + self.size]
        return self.x[rows], self.y[rows]

    def _steps_per_epoch(self, workers: int) -> int:
        return len(self.x) // (self.size * workers)


def one_step(options: Settings, batches: Batches, model: Network, kv: mpips.KVStore, step: int) -> None:
    """Push the gradients of this worker's batch, and pull the parameters."""
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
        # A process has died. recover() waits until a spare has replaced it, and returns the step to continue from.
        except mpips.StoreError:
            step = kv.recover().step
    if rank == 0:
        print(f"test accuracy {accuracy:.3f} after {step} steps")
    return accuracy


if __name__ == "__main__":
    main(parse_settings("dist_sync", "mpi_sync"))
