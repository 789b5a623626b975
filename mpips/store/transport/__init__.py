"""The wire between workers and servers: frames, lines that carry them, and the payloads of pushes and pulls.

`frames` defines the messages. `lines` carries them, by rings on a node and by MPI messages between nodes. `pending`
keeps track of messages under way, and gives them tags. Payloads: `outbox` (on a node) and `client_sums` (between the
members of a client on several nodes).
"""
