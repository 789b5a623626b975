"""Serial SGD in one process. Every synchronous mode must give the same results.

python examples/serial.py
"""

import mpips
from mpips.optimizers import SGD, Updater
from task import Settings, Task, parse_settings


def main(options: Settings) -> Task:
    task = Task("serial", mpips.create("local"), options)
    sgd = Updater(SGD(options.learning_rate, momentum=options.momentum), task.model.parameters)
    for epoch in task.epochs():
        for x, y in task.batches(epoch):
            task.model.forward(x)
            task.model.backward(y)
            sgd.update(task.model.gradients)
    return task


if __name__ == "__main__":
    main(parse_settings())
