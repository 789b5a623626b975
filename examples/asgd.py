"""Asynchronous SGD (figure 7): gradients are pushed, the servers update at once, and parameters are pulled.

mpips run --servers 2 --clients 2 --workers 4 examples/asgd.py --kind mpi_async
mpips run --servers 2 --workers 4 examples/asgd.py --kind dist_async

mpi_async (mpi-ASGD): the workers of a client sum their gradients; the master pushes the sum without waiting for others.
dist_async (dist-ASGD): every worker pushes its own gradient and waits for no other worker.
"""

import mpips
from mpips.optimizers import SGD
from task import Settings, Task, mode, settings


def main(options: Settings) -> Task:
    kv = mpips.create(options.kind)
    task = Task(mode(options.kind, "ASGD"), kv, options)
    model, keys = task.model, task.model.names
    kv.init(keys, model.parameters)
    # A push is the sum over a client's workers. The servers should update by their mean.
    rescale = len(kv.layout.clients) / kv.num_workers
    kv.set_optimizer(SGD(options.learning_rate, momentum=options.momentum, rescale=rescale))
    kv.pull(keys, model.parameters)
    for epoch in task.epochs():
        for x, y in task.batches(epoch):
            model.forward(x)
            model.backward(y)
            kv.push(keys, model.gradients)
            kv.pull(keys, model.parameters)
    kv.close()
    return task


if __name__ == "__main__":
    main(settings("mpi_async", "dist_async"))
