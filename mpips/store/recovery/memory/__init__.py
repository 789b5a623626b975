"""The memory of a server's units, which outlives it.

From the bottom: `undo` (what a unit held one round before), `ledger` (where units lie), `surviving` (a unit in such
memory), `units` (how they are made), `held` (what every rank of a node keeps of them).
"""
