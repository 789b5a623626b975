"""Keys: what a caller may hand over, what a worker knows of a key, which server keeps what.

`arguments` checks a caller's keys and arrays. `key` is a key with its shards on servers. `sharding` decides which
server keeps which elements, and `cutting` cuts a key by that. `row_sparse` has gradients with few rows that are not
zero.
"""
