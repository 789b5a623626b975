"""Keys: what a caller may hand over, what a worker knows of a key, which server keeps what.

`arguments`: a caller's keys and arrays, checked. `key`: a key, and its shards on servers. `sharding`, `cutting`: who
keeps what. `row_sparse`: gradients of which only some rows are not zero.
"""
