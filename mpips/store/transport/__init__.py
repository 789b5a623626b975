"""The wire between workers and servers: frames, lines that carry them, and the payloads of pushes and pulls.

`frames` (what is said), `lines` (rings on a node, messages between nodes), `pending` (messages under way, and their
tags); payloads: `outbox` (on a node), `client_sums` (between the members of a client).
"""
