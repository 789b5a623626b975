"""A store without servers: every worker keeps every key, a push is an allreduce, the optimizer runs on the workers.

`store` has its operations. `replica` is one key on a worker; if the store survives deaths it can go back a round.
`replicas` has all keys, with optimizers and compression. `fast` has the fast paths of a key and of a list, and the
collectives, also those of row-sparse pushes.
"""
