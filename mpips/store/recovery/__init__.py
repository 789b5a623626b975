"""Recovery: how a store continues after a failure or the death of a process.

A generation is the life of a store between two failures. A recovery begins the next generation with what is left of the
last one. `recover` has the steps in order, and moves the bytes. `membership` (which rank takes which place) and `plan`
(what each rank holds, the round of each key, where each unit comes from) are pure. `memory` keeps units in shared
memory that outlives their server, with an `undo` copy of the previous round. `mirror` keeps a second copy of each unit
on another node.
"""
