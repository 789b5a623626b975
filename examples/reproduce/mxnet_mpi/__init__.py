"""MXNET-MPI (Mamidala et al., 2018): six modes of training, beside MXNet's own dist_sync."""
