"""Keys: checks of a caller's arguments, a worker's record of each key, and which server keeps which elements.

`arguments` checks a caller's keys and arrays. `key` has a worker's record of a key and of its shards, the parts on
servers. `sharding` decides which server keeps which elements, and `cutting` cuts a key accordingly. `row_sparse`
handles gradients with only a few nonzero rows. `row_sums` adds rows up, for these gradients and for tables.
"""
