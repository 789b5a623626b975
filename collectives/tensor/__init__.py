"""Collectives on tensors: a list of vectors, one for each GPU of the worker, reduced together as one object.

Source: MXNET-MPI paper, section 6. Algorithms of an allreduce, by name:
  auto          the one expected to be fastest
  multi_ring    the paper's: rings between host buffers; one ring reduces while another has messages on the wire
  NAME          any algorithm of `collectives.schedule.catalog`, fused with the reduction over the vectors in this way
  host_ring     reduce all vectors into one in host memory, run a ring, copy back (the paper's omp_ring)
  shared_memory, native  a plan of that name between host vectors

Other kinds go through one host vector. In kinds that reduce, the worker contributes the reduction of its vectors; in
other kinds it contributes its first vector. All vectors get the result.
"""
