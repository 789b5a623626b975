"""PyTorch on mpips: `import mpips.torch` makes "mpips" a backend of torch.distributed.

    import torch.distributed as dist, mpips.torch
    dist.init_process_group("mpips")            # under mpirun, mpips run or srun: rank and size come from MPI
"""

from mpips.torch.backend import register

register()
