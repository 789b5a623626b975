"""A store without servers: every worker keeps every key, a push is an allreduce, the optimizer runs on the workers.

`serverless`: its operations. `replica`: what a worker keeps of a key; `replicas`: of all keys. `fast`: the fast routes
of a key and of a list. `sums`: the collectives. `spread`: long values that the workers of a node keep together.
`sparse`: row-sparse pushes. `settings`: optimizers and compression. `stored`: what goes to files. `reconcile`: how
workers become alike again after a generation has ended. `undo`: what a key held a round before; `surviving`: a replica
that can go back there.
"""
