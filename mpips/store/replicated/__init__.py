"""A store without servers: every worker keeps every key, a push is an allreduce, the optimizer runs on the workers.

`store`: its operations. `replica`: one key on a worker, which can go back a round where the store survives deaths;
`replicas`: all keys, with optimizers and compression. `fast`: the fast paths of a key and of a list, and the
collectives, those of row-sparse pushes, too.
"""
