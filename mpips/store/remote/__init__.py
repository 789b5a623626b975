"""A store with servers, on a worker: how a key's value travels between the training loop and the servers.

`store`: the operations of such a store. `link`: what a worker says to servers and hears from them. `client`: pushes and
pulls of a worker, by itself or in a client, whose `members` meet; `sparse`: of rows; `transfers`: to and from servers.
`fast`: the fast path of a key. `setup`: keys are made, forgotten, recovered. `states`: optimizer, compression, and
what goes to files.
"""
