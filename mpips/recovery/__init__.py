"""How a store goes on after a death.

`membership`: who takes which place. `shrink`: the communicator of those who are left, on which all agree. `spare`: how
a spare waits. `rounds`: at which round keys stand again.
"""
