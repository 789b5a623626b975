"""Checkpoints: what a store holds, to a file and back.

`save` and `load` handle values, optimizers and their states, compression and its residuals. `resume` has a store save
itself in a `folder` and go on from there. `file` writes a file that is there whole or not at all.
"""
