"""Checkpoints: what a store holds, to a file and back.

`save`, `load`: values, optimizers and their states, compression and what it kept back (`residuals`). `states`: the
optimizers' states alone. `file`: the file, there whole or not at all. `source`: what a checkpoint needs of a store.
"""
