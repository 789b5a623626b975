"""MXNET-MPI, section 7.3: allreduce of tensors by the paper's algorithm and its rivals."""
