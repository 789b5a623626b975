"""Benchmarks of the store and the optimizers."""
