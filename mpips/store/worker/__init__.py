"""A worker's calls of the store: check them, put them in order and run them, in stores with and without servers.

`route` takes every push and pull, and sends plain arrays along a fast path. `operations` is the general path for all
other pushes and pulls. `store` has the calls that all workers make together. `recut` has one more such call, which
replaces keys. `restored` tracks content that came from a checkpoint and that the program has not asked for yet.
`waiting` detects deadlocks between workers. `interface` is the protocol that stores with and without servers implement.
"""
