"""dist-SGD (figure 6): every worker pushes its gradient to the servers, which sum; all workers update alike.

mpips run --servers 2 --workers 4 examples/dist_sgd.py
"""

import mpips
from mpips.optimizers import SGD, Updater
from task import Settings, Task, settings


def main(options: Settings) -> Task:
    kv = mpips.create("dist_sync")
    task = Task("dist-SGD", kv, options)
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
