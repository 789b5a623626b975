"""Collectives on tensors. A tensor is a list of vectors, one for each GPU of the worker, reduced as one object.

Source: MXNET-MPI paper, section 6. Algorithms of an allreduce, by name:
  auto          the algorithm that is expected to be fastest
  multi_ring    the paper's algorithm: rings between host buffers; one ring reduces while another is on the wire
  NAME          any algorithm of `collectives.schedule.catalog`, fused with the reduction over the vectors like
                multi_ring
  host_ring     reduce all vectors into one vector in host memory, run a ring, copy back (the paper's omp_ring)
  shared_memory, native  like host_ring, but with this algorithm instead of the ring

All other kinds of collectives go through one host vector. In kinds that reduce, the worker contributes the reduction of
its vectors. In other kinds it contributes its first vector. All vectors get the result.
"""
