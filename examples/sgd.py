"""Synchronous SGD (figure 6): gradients are pushed, their sum is pulled, and all workers make the same update.

mpips run --servers 2 --clients 2 --workers 4 examples/sgd.py --kind mpi_sync
mpips run --servers 2 --workers 4 examples/sgd.py --kind dist_sync

mpi_sync (mpi-SGD): the workers of a client sum their gradients, and its master pushes the sum.
dist_sync (dist-SGD): every worker pushes its own gradient.
"""

import mpips
from mpips.optimizers import SGD, Updater
from task import Settings, Task, mode, settings


def main(options: Settings) -> Task:
    kv = mpips.create(options.kind)
    task = Task(mode(options.kind, "SGD"), kv, options)
    model, keys = task.model, task.model.names
    kv.init(keys, model.parameters)
    kv.pull(keys, model.parameters)
    # A gradient is the mean over a worker's batch. The store gives their sum; the update needs their mean.
    rescale = 1 / kv.num_workers
    sgd = Updater(SGD(options.learning_rate, momentum=options.momentum, rescale=rescale), model.parameters)
    for epoch in task.epochs():
        for x, y in task.batches(epoch):
            model.forward(x)
            model.backward(y)
            kv.push(keys, model.gradients)
            kv.pull(keys, model.gradients)
            sgd.update(model.gradients)
    kv.close()
    return task


if __name__ == "__main__":
    main(settings("mpi_sync", "dist_sync"))
