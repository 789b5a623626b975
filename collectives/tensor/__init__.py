"""Collectives on tensors: a list of vectors, one for each GPU of the worker, reduced together as one object.

Source: MXNET-MPI paper, section 6. Algorithms of an allreduce, by name:
  auto          what is best here
  multi_ring    the paper's: rings between host buffers, reductions of one ring beside the messages of another
  NAME          any algorithm of `collectives.schedule.catalog`, likewise fused with the reduction over the vectors
  host_ring     reduce all into host memory, ring there, spread (the paper's omp_ring)
  shared_memory, native  a plan of that name between host vectors
Other kinds go through one host vector. The worker's vectors are reduced where the kind reduces; where it does not, the
first one is what the worker gives. All get the result.
"""
