"""The calls of a worker: checked, put in order, done now or started, by whichever backend the store has.

`operations`: every call's way. `quick`: the short way of a plain array. `settings`, `recut`: what all make together.
`bundle`: small keys of one call as one vector. `backend`: what a store with or without servers offers.
"""
