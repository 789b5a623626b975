"""`mpips bench`: benchmarks of the store, the optimizers and MLPs."""
