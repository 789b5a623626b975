"""dist-ASGD (figure 7): the servers update with each worker's gradient as it comes, and the worker goes on.

mpips run --servers 2 --workers 4 examples/dist_asgd.py
"""

import mpips
from mpips.optimizers import SGD
from task import Settings, Task, settings


def main(options: Settings) -> Task:
    kv = mpips.create("dist_async")
    task = Task("dist-ASGD", kv, options)
    model, keys = task.model, task.model.names
    kv.init(keys, model.parameters)
    kv.set_optimizer(SGD(options.learning_rate))
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
