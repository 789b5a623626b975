"""Keys: what a caller may hand over, what a worker knows of a key, which server keeps what.

`arguments`, `arrays`, `calls`: a caller's keys and arrays, checked. `key`, `shard`: a key and its shards on servers.
`sharding`: who keeps what. `row_sparse`: gradients of which only some rows are not zero.
"""
