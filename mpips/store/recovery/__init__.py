"""A store goes on after a failure or a death: what is left of a generation becomes the next one.

`recover` has the steps in order, and moves the bytes. `membership` (which rank takes which place) and `plan` (what each
rank holds, the round of each key, where each unit comes from) are pure. `memory` keeps units in shared memory that
outlives their server, with an `undo` copy of the round before. `mirror` keeps a second copy of each unit on another
node.
"""
