"""Checkpoints: write the content of a store to a file, and load it again.

`save` and `load` handle values, optimizers with their states, and compression with its residuals (the parts of
gradients that it has held back). `resume` lets a store save itself regularly in a `folder`, and continue from the
newest checkpoint there. `file` writes a file in such a way that it is either complete or absent.
"""
