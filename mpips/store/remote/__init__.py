"""The worker's side of a store with servers: how a key's value travels between the training loop and the servers.

`store` has the operations of such a store. `link` is a worker's connection to all servers. `client` pushes and pulls
whole keys, either for a single worker or for a client, which is a group of workers that sum before they push. `members`
has the collectives inside a client. `sparse` pushes and pulls rows of keys. `transfers` moves values to and from
servers, and `fast` is the fast path of a key. `setup` makes, forgets and recovers keys. `states` handles optimizers,
compression, and the states that checkpoints contain.
"""
