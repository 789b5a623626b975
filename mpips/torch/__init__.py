"""PyTorch on mpips: `import mpips.torch` makes "mpips" a backend of torch.distributed.

    import torch.distributed as dist, mpips.torch
    dist.init_process_group("mpips")            # under mpirun, mpips run or srun: rank and size come from MPI
    model = mpips.torch.DataParallel(model)     # or torch's own DistributedDataParallel(model)

After this import, an uncaught exception on any rank ends the whole job.
"""

from importlib.util import find_spec

if find_spec("torch") is None:
    raise ModuleNotFoundError("mpips.torch needs PyTorch: pip install 'mpips[torch]'", name="torch")

from mpips.ending import end_job_on_error
from mpips.torch.backend import register
from mpips.torch.collection import EmbeddingBagCollection
from mpips.torch.data_parallel import DataParallel
from mpips.torch.direct import all_reduce
from mpips.torch.embedding import Embedding, EmbeddingBag, TableOptimizer
from mpips.torch.local import LocalSGD
from mpips.torch.optimizer.distributed import DistributedOptimizer
from mpips.torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = [
    "DataParallel",
    "DistributedOptimizer",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "LocalSGD",
    "TableOptimizer",
    "all_reduce",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

end_job_on_error()
register()
