"""Pure MPI (section 4.2.4 of the paper): no servers, one allreduce per iteration, the optimizer on every worker.

mpips run --workers 4 examples/pure_mpi.py
"""

import mpips
from mpips.optimizers import SGD
from task import Settings, Task, parse_settings


def main(options: Settings) -> Task:
    kv = mpips.create("mpi_sync")
    task = Task("pure MPI", kv, options)
    model, keys = task.model, task.model.names
    kv.init(keys, model.parameters)
    kv.set_optimizer(SGD(options.learning_rate, momentum=options.momentum, rescale=1 / kv.num_workers))
    kv.pull(keys, model.parameters)
    for epoch in task.epochs():
        for x, y in task.batches(epoch):
            model.forward(x)
            model.backward(y)
            kv.pushpull(keys, model.gradients, out=model.parameters)
    kv.close()
    return task


if __name__ == "__main__":
    main(parse_settings())
