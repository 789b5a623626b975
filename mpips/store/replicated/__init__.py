"""A store without servers: every worker keeps every key, a push is an allreduce, the optimizer runs on the workers.

`store` has the store's operations. `replica` is one key on a worker; in a store that survives deaths, a key can go back
one round. `replicas` has all keys, with optimizers and compression. `fast` has the fast paths of one key and of a list
of keys, and the collectives.
"""
