"""The communication between workers and servers: messages, connections, and the data of pushes and pulls.

`frames` defines the messages. `lines` carries them, in shared memory within a node and as MPI messages between nodes.
`pending` tracks MPI messages in flight and assigns their tags. `outbox` passes the data of a push to a server on the
same node. `client_sums` sums data among the members of a client that spans several nodes.
"""
