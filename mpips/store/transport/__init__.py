"""What moves between workers and servers: frames, rings of a node, messages of the network, memory that pushes lie in.

Imports go one way: frames, then line, ring and outbox, then what knows shards (`mpips.store.keys`): lent, sender,
receiver.
"""
