"""A second copy of every shard on a server of another node, so that a whole node may be lost (option `mirrors`).

From the bottom: `ring` (who mirrors whom), `copies` (what a server keeps for others), `letters` (what servers say to
each other), `sending` and `keeping` (the two ends), `mirror` (both, in one generation).
"""
