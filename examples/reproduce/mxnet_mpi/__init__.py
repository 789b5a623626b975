"""MXNET-MPI (Mamidala et al., 2018): six modes of training, compared with MXNet's own dist_sync."""
