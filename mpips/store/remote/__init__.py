"""A store with servers, on a worker: how a key's value travels between the training loop and the servers.

`store` has the operations of such a store. `link` is a worker's connection to all servers. `client` pushes and pulls
whole keys, for a worker by itself or for the members of a client, who meet in `members`. `sparse` does so for rows.
`transfers` moves values to and from servers, and `fast` is the fast path of a key. `setup` makes, forgets and recovers
keys. `states` has optimizers, compression, and what goes to files.
"""
