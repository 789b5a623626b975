"""The program of each rank that times a rival from PyTorch: the allreduce in shared memory of DeepSpeed or of vLLM.

mpips run -w P -m examples.reproduce.allreduce.rivals DeepSpeed --dtype float32 --sizes 8,1KiB --seconds 0.5 --json FILE

The calls are timed and checked in the same way as those of `mpips bench`, on tensors of PyTorch, with one thread for
each rank. Both rivals only sum, in place, float32 and bfloat16.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable
from pathlib import Path

import click
import ml_dtypes
import numpy as np
import torch
from mpi4py import MPI

from collectives.benchmark import harness, report
from collectives.benchmark.case import BenchmarkCase
from collectives.terminal import OutFile, RankedCommand, Seconds, parse_counts

# the name of a rival -> the package that has it
PACKAGES = {"DeepSpeed": "deepspeed", "vLLM": "vllm"}
DTYPES = {
    "float32": (torch.float32, np.dtype(np.float32)),
    "bfloat16": (torch.bfloat16, np.dtype(ml_dtypes.bfloat16)),
}

# sums a tensor over all ranks, in place
Allreduce = Callable[[torch.Tensor], object]


def deepspeed(comm: MPI.Intracomm) -> Allreduce:
    """Return DeepSpeed's operator, which rank 0 compiles at the first call. Collective."""
    # DeepSpeed names its shared memory by the address and the port of a job.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = comm.bcast(probe.getsockname()[1])
    os.environ |= {"LOCAL_SIZE": str(comm.size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    if comm.rank == 0:
        ShareMemCommBuilder().load()
    comm.Barrier()
    ShareMemCommBuilder().load().initialize(comm.size, comm.rank)
    return torch.ops.deepspeed.inference_all_reduce_


def vllm(comm: MPI.Intracomm) -> Allreduce:
    """Return vLLM's operator. Only the library of its operators is loaded, not vLLM itself. Collective."""
    package = importlib.util.find_spec("vllm")
    assert package is not None and package.submodule_search_locations is not None
    # vLLM chooses in the same way.
    instructions = "_C_AVX512" if torch.cpu._is_avx512_supported() else "_C_AVX2"
    stem = "_C" if torch.cpu._is_avx512_bf16_supported() else instructions
    (library,) = Path(package.submodule_search_locations[0]).glob(f"{stem}.*so")
    torch.ops.load_library(library)
    name = comm.bcast(f"vllm_{os.getpid()}")
    handle = torch.ops._C.init_shm_manager(name, comm.size, comm.rank, 1)
    comm.Barrier()
    torch.ops._C.join_shm_manager(handle, name)
    comm.Barrier()
    return lambda tensor: torch.ops._C.shm_allreduce(handle, tensor)


RIVALS = {"DeepSpeed": deepspeed, "vLLM": vllm}


def measure(rival: str, allreduce: Allreduce, dtype: str, n: int, seconds: float, comm: MPI.Intracomm) -> report.Row:
    """Check an allreduce of n elements, and time it. Collective."""
    of_torch, of_numpy = DTYPES[dtype]
    tensor = torch.zeros(n, dtype=of_torch)
    array = tensor.view(torch.int16).numpy().view(of_numpy) if of_torch is torch.bfloat16 else tensor.numpy()
    case = BenchmarkCase("allreduce", "sum", of_numpy, n, comm, {"ordinary": (array, array)})
    wrong = case.check(lambda: allreduce(tensor), array, array)()
    copy, time = harness.measure(comm, [case.copy(), lambda: allreduce(tensor)], seconds, renew=case.renew)
    return report.Row.measured(
        "allreduce", of_numpy, "sum", comm.size, n, rival, "ordinary", time, wrong=wrong, floor=copy.median
    )


@click.command(cls=RankedCommand)
@click.argument("rival", type=click.Choice(tuple(RIVALS)))
@click.option("--dtype", type=click.Choice(tuple(DTYPES)), default="float32", show_default=True)
@click.option("--sizes", default="8,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB", show_default=True)
@click.option("--seconds", default=0.5, type=Seconds(), show_default=True, help="For each size.")
@click.option("--json", "json_path", type=OutFile(), required=True)
def main(rival: str, dtype: str, sizes: str, seconds: float, json_path: Path) -> None:
    """Measure a rival and write the rows as JSON."""
    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    allreduce = RIVALS[rival](comm)
    counts = parse_counts(sizes, DTYPES[dtype][1].itemsize, dtype)
    rows = [measure(rival, allreduce, dtype, n, seconds, comm) for n in counts]
    if comm.rank == 0:
        report.write_rows(rows, json_path)


if __name__ == "__main__":
    main()
