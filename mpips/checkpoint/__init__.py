"""Checkpoints: what a store holds, to a file and back.

`file`: the file, there whole or not at all. `source`: what a checkpoint needs of a store. `save`, `load`: values,
optimizers and their states, compression and what it kept back (`residuals`). `states`: the optimizers' states alone.
"""

from mpips.checkpoint.file import write
from mpips.checkpoint.load import load
from mpips.checkpoint.save import Saving, save
from mpips.checkpoint.source import Frozen, Snapshot, Store
from mpips.checkpoint.states import load_states, save_states

__all__ = ["Frozen", "Saving", "Snapshot", "Store", "load", "load_states", "save", "save_states", "write"]
