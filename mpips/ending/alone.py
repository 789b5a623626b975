"""Notice at the end of a job that its ranks never exchanged anything.

If a program does not find the other ranks, every rank silently trains a model of its own. Rank 0 decides for the whole
job from its own process, because exchanges without rank 0 are rare. It assumes an exchange if its process has started
MPI or has made a process group of another library. With PyTorch's backend "mpips" a process group is not enough:
gradients must have gone through it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

from mpips.ending.process import runs
from mpips.store.world import launched_as


def remark() -> str:
    """Return the warning that rank 0 prints at the end of a job whose ranks have exchanged nothing.

    On other ranks, or if the ranks have exchanged something, return "".
    """
    rank, size = launched_as(os.environ) or (0, 1)
    if rank or size < 2:
        return ""
    if runs():
        torch = sys.modules.get("mpips.torch.lone")
        if torch is None or not torch.watch.trained_alone():
            return ""
        return (
            f"the {size} ranks of this job made a process group, but no gradients went through it: each rank has "
            "trained a model of its own. To train one on all of them, wrap it in DistributedDataParallel or "
            "mpips.torch.DataParallel"
        )
    if _has_other_group():
        return ""
    return (
        f"the {size} ranks of this job ran side by side and never exchanged anything, which is right for independent "
        "runs. To train one model on all of them, make a store (mpips.create), or call "
        "torch.distributed.init_process_group and wrap the model in DistributedDataParallel"
    )


def _has_other_group() -> bool:
    """True if this process has, or had, a process group that another library than mpips has made."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is not None and (getattr(c10d, "_default_pg_init_method", None) is not None or c10d.is_initialized()):
        return True
    jax: Any = sys.modules.get("jax._src.distributed")
    if jax is not None and jax.global_state.coordinator_address is not None:
        return True
    with suppress(OSError), open("/proc/self/maps") as maps:
        # A loaded MPI library means that a library other than mpi4py may have started MPI.
        return any("/libmpi" in line for line in maps)
    return False
