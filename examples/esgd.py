"""Elastic SGD (figure 8): each client runs SGD by itself. Sometimes it and the servers' centre move together.

mpips run --servers 2 --clients 2 --workers 4 examples/esgd.py --kind mpi_async
mpips run --servers 2 --workers 4 examples/esgd.py --kind dist_async

mpi_async (mpi-ESGD): a client's workers sum their gradients in every iteration, so their parameters stay equal.
dist_async (dist-ESGD): every worker is its own client.
"""

import numpy as np

import collectives
import mpips
from mpips.optimizers import SGD, Elastic1, Elastic2, Updater
from task import Settings, Task, mode, settings


def main(options: Settings) -> Task:
    kv = mpips.create(options.kind)
    task = Task(mode(options.kind, "ESGD"), kv, options)
    model, keys = task.model, task.model.names
    client = kv.layout.client
    centers = [np.empty_like(parameter) for parameter in model.parameters]
    kv.init(keys, model.parameters)
    kv.set_optimizer(Elastic1(options.alpha))
    kv.pull(keys, model.parameters)
    elastic2 = Updater(Elastic2(options.alpha), model.parameters)
    # A gradient is the mean over a worker's batch. The allreduce gives their sum; the update needs their mean.
    rescale = 1 / client.Get_size()
    sgd = Updater(SGD(options.learning_rate, momentum=options.momentum, rescale=rescale), model.parameters)
    iteration = 0
    for epoch in task.epochs():
        for x, y in task.batches(epoch):
            model.forward(x)
            model.backward(y)
            if iteration % options.interval == 0:
                # The push sums over the client's workers, so each pushes its share of the client's parameters.
                for center, parameter in zip(centers, model.parameters):
                    np.multiply(parameter, rescale, out=center)
                kv.push(keys, centers)
                kv.pull(keys, centers)
                elastic2.update(centers)
            collectives.grouped_allreduce(model.gradients, client)
            sgd.update(model.gradients)
            iteration += 1
    kv.close()
    return task


if __name__ == "__main__":
    main(settings("mpi_async", "dist_async"))
