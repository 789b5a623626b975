"""A store without servers: every worker keeps every key, a push is an allreduce, the optimizer runs on the workers.

`store`: its operations. `replica`: one key on a worker, which can go back a round where the store survives deaths;
`replicas`: all keys. `fast`: the fast routes of a key and of a list, and the collectives. `sparse`: row-sparse pushes,
and long values that the workers of a node keep together. `settings`: optimizers and compression.
"""
