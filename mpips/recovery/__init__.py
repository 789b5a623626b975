"""What is left when processes of a store die, and how it becomes the next epoch.

`undo` keeps what a unit held one round before, `ledger` says where a server's units lie, `inventory` what there is,
`choice` at which round keys stand, `plan` who keeps what from now on, `fill` moves it there, and `held` is what a rank
keeps of the servers' memory meanwhile.
"""
