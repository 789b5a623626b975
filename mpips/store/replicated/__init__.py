"""A store without servers: every worker keeps every key, a push is an allreduce, the optimizer runs on the workers.

`serverless`: its operations. `replica`: what a worker keeps of a key; `replicas`: of all keys. `fast`: the fast routes
of a key and of a list. `sums`: the collectives. `spread`: long values that the workers of a node keep together.
`sparse`: row-sparse pushes. `settings`: optimizers and compression. `stored`: what goes to files. `surviving`: a
replica that can go back to the round before, as `recovery.undo` keeps it.
"""
