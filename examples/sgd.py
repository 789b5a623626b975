"""Synchronous SGD (figure 6 of the paper): workers push gradients, pull their sum, and all make the same update.

mpips run --servers 2 --clients 2 --workers 4 examples/sgd.py --kind mpi_sync
mpips run --servers 2 --workers 4 examples/sgd.py --kind dist_sync

mpi_sync (mpi-SGD): the workers of a client sum their gradients, and the master of the client pushes the sum.
dist_sync (dist-SGD): every worker pushes its own gradient.
"""

import mpips
from mpips.optimizers import SGD, Updater
from task import Settings, Task, name_mode, parse_settings


def main(options: Settings) -> Task:
    kv = mpips.create(options.kind)
    task = Task(name_mode(options.kind, "SGD"), kv, options)
    model, keys = task.model, task.model.names
    kv.init(keys, model.parameters)
    kv.pull(keys, model.parameters)
    # A gradient is the mean over a worker's batch. The store sums the gradients of all workers; the update needs the
    # mean.
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
    main(parse_settings("mpi_sync", "dist_sync"))
