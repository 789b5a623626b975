"""Predicts the time of an algorithm on a network: `cost` by formula, `simulate` by clocks of all ranks."""
