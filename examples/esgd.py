"""Elastic SGD (figure 8 of the paper): each client runs SGD by itself, and is pulled towards a common centre.

mpips run --servers 2 --clients 2 --workers 4 examples/esgd.py --kind mpi_async
mpips run --servers 2 --workers 4 examples/esgd.py --kind dist_async

The centre is on the servers. Every --interval iterations, the parameters of a client and the centre move towards each
other.

mpi_async (mpi-ESGD): the workers of a client sum their gradients in every iteration, so their parameters stay equal.
dist_async (dist-ESGD): every worker is a client of its own.
"""

import numpy as np

import collectives
import mpips
from mpips.optimizers import SGD, Elastic1, Elastic2, Updater
from task import Settings, Task, name_mode, parse_settings


def main(options: Settings) -> Task:
    kv = mpips.create(options.kind)
    task = Task(name_mode(options.kind, "ESGD"), kv, options)
    model, keys = task.model, task.model.names
    client = kv.layout.client
    centers = [np.empty_like(parameter) for parameter in model.parameters]
    kv.init(keys, model.parameters)
    kv.set_optimizer(Elastic1(options.alpha))
    kv.pull(keys, model.parameters)
    elastic2 = Updater(Elastic2(options.alpha), model.parameters)
    # A gradient is the mean over a worker's batch. The allreduce sums the gradients; the update needs their mean.
    rescale = 1 / client.Get_size()
    sgd = Updater(SGD(options.learning_rate, momentum=options.momentum, rescale=rescale), model.parameters)
    iteration = 0
    for epoch in task.epochs():
        for x, y in task.batches(epoch):
            model.forward(x)
            model.backward(y)
            if iteration % options.interval == 0:
                # A push is the sum over the workers of a client. They all have the same parameters, so each pushes its
                # share of them.
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
    main(parse_settings("mpi_async", "dist_async"))
