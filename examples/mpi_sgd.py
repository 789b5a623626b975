"""mpi-SGD (figure 6): a client reduces its workers' gradients, its master pushes the sum; all workers update alike.

mpips run --servers 2 --clients 2 --workers 4 examples/mpi_sgd.py
"""

import mpips
from mpips.optimizers import SGD, Updater
from task import Settings, Task, settings


def main(options: Settings) -> Task:
    kv = mpips.create("mpi_sync")
    task = Task("mpi-SGD", kv, options)
    model, keys = task.model, task.model.names
    kv.init(keys, model.parameters)
    kv.pull(keys, model.parameters)
    rescale = 1 / kv.num_workers  # each gradient is the mean over a worker's batch, the store gives their sum
    sgd = Updater(SGD(options.learning_rate, momentum=options.momentum, rescale=rescale), model.parameters)
    for epoch in task.epochs():
        for x, y in task.batches(epoch):
            task.backward(x, y)
            kv.push(keys, model.gradients)
            kv.pull(keys, model.gradients)
            sgd.update(model.gradients)
    kv.close()
    return task


if __name__ == "__main__":
    main(settings())
