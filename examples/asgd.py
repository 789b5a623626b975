"""Asynchronous SGD (figure 7 of the paper): workers push gradients, servers update at once, workers pull parameters.

mpips run --servers 2 --clients 2 --workers 4 examples/asgd.py --kind mpi_async
mpips run --servers 2 --workers 4 examples/asgd.py --kind dist_async

mpi_async (mpi-ASGD): the workers of a client sum their gradients. The master of the client pushes the sum, and does not
wait for other clients.
dist_async (dist-ASGD): every worker pushes its own gradient, and does not wait for other workers.
"""

import mpips
from mpips.optimizers import SGD
from task import Settings, Task, name_mode, parse_settings


def main(options: Settings) -> Task:
    kv = mpips.create(options.kind)
    task = Task(name_mode(options.kind, "ASGD"), kv, options)
    model, keys = task.model, task.model.names
    kv.init(keys, model.parameters)
    # A push is the sum over the workers of a client. The servers should update by the mean.
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
    main(parse_settings("mpi_async", "dist_async"))
