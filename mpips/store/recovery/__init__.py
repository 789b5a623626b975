"""How a store goes on after a death: what is left of a generation becomes the next one.

Ranks: `membership` (who takes which place), `shrink` (the communicator of those who are left, on which all agree),
`renewal` (how the next generation begins), `spare` (how one waits). `memory`: that of servers, which outlives them.
The next
generation: `inventory` (what there is), `rounds` and `choice` (at which round keys stand), `plan` (who keeps what),
`fill` (how it gets there), `rebuild` (what all ranks do together).
"""
