"""A store goes on after a failure or a death: what is left of a generation becomes the next one.

`recover` tells the whole story. Pure: `membership` (which rank takes which place), `plan` (at which round keys stand,
and where each unit comes from). `memory`: units in shared memory that outlives their server, with an `undo` copy of the
round before. `copies` and `mirror`: a second copy of each unit on another node. `transfer`: bytes go where the plan
says.
"""
