"""The memory that the ranks of one node share: arrays, words, waiting, the end of an epoch."""
