"""Keys: checks of a caller's arguments, a worker's record of each key, and which server keeps which elements.

`arguments` checks a caller's keys and arrays. `key` is a key with its shards on servers. `sharding` decides which
server keeps which elements, and `cutting` cuts a key accordingly. `row_sparse` handles gradients of which only a few
rows are not zero, and `row_sums` adds rows up, for these gradients and for tables.
"""
