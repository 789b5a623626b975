"""How a store goes on after a death: what is left of an epoch becomes the next one.

Ranks: `membership` (who takes which place), `shrink` (the communicator of those who are left, on which all agree),
`spare` (how a spare waits). Memory of servers: `undo` (what a unit held one round before), `ledger` (where units lie),
`units` (how they are made), `held` (what a rank keeps of them). The next epoch: `inventory` (what there is), `rounds`
and `choice` (at which round keys stand), `plan` (who keeps what), `fill` (how it gets there), `rebuild` (what all ranks
do together).
"""
