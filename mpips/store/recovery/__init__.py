"""A store goes on after a failure or a death: what is left of a generation becomes the next one.

`recover` tells the whole story, and moves the bytes. Pure: `membership` (which rank takes which place), `plan` (what
each rank holds, at which round keys stand, and where each unit comes from). `memory`: units in shared memory that
outlives their server, with an `undo` copy of the round before. `mirror`: a second copy of each unit on another node.
"""
