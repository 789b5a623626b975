"""Microbenchmarks of the collectives: `mpips bench` or `mpirun -n P python -m collectives.bench`."""
