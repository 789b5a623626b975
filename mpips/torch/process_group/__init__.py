"""The process group of c10d: its calls on CPU tensors as jobs, which `collectives` and MPI carry out."""
