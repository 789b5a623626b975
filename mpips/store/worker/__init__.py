"""The calls of a worker: checked, put in order, done now or started, by whichever backend the store has.

`route`: every call's way, a short one for a plain array; small keys of one call go as one vector. `store`, `recut`:
what all workers make together. `generations`: recovery and the end. `restored`: what a checkpoint has given. `waiting`:
workers that wait in vain. `interface`: what a store with or without servers offers.
"""
