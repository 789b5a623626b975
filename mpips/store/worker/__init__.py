"""The calls of a worker: checked, put in order, then run or started, whether the store has servers or not.

`route` takes every push and pull, on a fast path for plain arrays. `operations` is the path of all other calls. `store`
has the calls that all workers make together, and `recut` the one that replaces keys. `restored` knows what came from a
checkpoint and is not asked for yet. `waiting` finds workers that wait in vain. `interface` is the protocol that stores
with and without servers implement.
"""
