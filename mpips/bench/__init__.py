"""`mpips bench`: benchmarks of the store, the optimizers, overlap and MLPs."""
