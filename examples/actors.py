"""Actors that read while learners write: an actor pulls the parameters whenever the servers have newer ones.

mpips run --servers 2 --workers 4 examples/actors.py

Learners run asynchronous SGD (figure 7 of the paper). The last worker is an actor: it never pushes, and no learner
waits for it. In this example it classifies the test images, as a service would. In reinforcement learning, an actor
would play with the newest policy.
"""

import sys

import mpips
from mpips.optimizers import SGD
from task import Settings, Task, parse_settings


def learn(task: Task, kv: mpips.KVStore) -> None:
    """Push gradients and pull parameters, as in asgd.py."""
    model, keys = task.model, task.model.names
    for epoch in task.epochs():
        for x, y in task.batches(epoch):
            model.forward(x)
            model.backward(y)
            kv.push(keys, model.gradients)
            kv.pull(keys, model.parameters)


def act(task: Task, kv: mpips.KVStore, last: int) -> None:
    """Classify with the newest parameters until the learners have pushed `last` times."""
    model, keys = task.model, task.model.names
    versions = [-1] * len(keys)
    # The learners are in the same barrier, at the beginning of task.epochs().
    kv.barrier()
    while min(versions) < last:
        before, versions = versions, kv.pull(keys, model.parameters, newer_than=versions)
        if versions != before:
            accuracy = model.accuracy(task.test_x, task.test_y)
            print(f"actor  version {min(versions)} of {last}  test accuracy {accuracy:.3f}", flush=True)


def main(options: Settings) -> Task:
    kv = mpips.create("dist_async")
    learners = kv.num_workers - 1
    if not learners:
        sys.exit("actors.py needs a learner and an actor: start it with --workers 2 or more")
    task = Task("actors", kv, options)
    kv.init(task.model.names, task.model.parameters)
    kv.set_optimizer(SGD(options.learning_rate, momentum=options.momentum))
    if kv.rank < learners:
        learn(task, kv)
    else:
        steps = len(task.x) // (options.batch_size * kv.num_workers)
        act(task, kv, options.epochs * steps * learners)
    kv.close()
    return task


if __name__ == "__main__":
    main(parse_settings())
