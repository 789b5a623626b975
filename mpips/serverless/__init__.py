"""A store without servers: every worker keeps every key, a push is an allreduce, the optimizer runs on the workers.

`serverless`: its operations. `replica`: what a worker keeps of a key. `fast`: the fast routes of a key and of a list.
`sparse`: row-sparse pushes. `reconcile`: how workers become alike again after an epoch has ended.
"""

from mpips.serverless.serverless import Serverless

__all__ = ["Serverless"]
