"""Checkpoints: what a store holds, to a file and back.

`save`, `load`: values, optimizers and their states, compression and what it kept back. `resume`: a store that saves
itself in a `folder`, and goes on from there. `file`: the file, there whole or not at all.
"""
