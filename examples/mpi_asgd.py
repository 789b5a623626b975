"""mpi-ASGD (figure 7): the servers update with each client's gradient as it comes; inside, a client is synchronous.

mpips run --servers 2 --clients 2 --workers 4 examples/mpi_asgd.py
"""

import mpips
from mpips.optimizers import SGD
from task import Settings, Task, settings


def main(options: Settings) -> Task:
    kv = mpips.create("mpi_async")
    task = Task("mpi-ASGD", kv, options)
    model, keys = task.model, task.model.names
    kv.init(keys, model.parameters)
    rescale = len(kv.layout.clients) / kv.num_workers  # a push is the sum over a client's workers
    kv.set_optimizer(SGD(options.learning_rate, rescale=rescale))
    kv.pull(keys, model.parameters)
    for epoch in task.epochs():
        for x, y in task.batches(epoch):
            task.backward(x, y)
            kv.push(keys, model.gradients)
            kv.pull(keys, model.parameters)
    kv.close()
    return task


if __name__ == "__main__":
    main(settings())
