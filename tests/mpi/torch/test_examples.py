"""The example of each public name of `mpips.torch` and `mpips.jax` gives what it shows, on any number of ranks."""

from __future__ import annotations

import pytest
import torch

import mpips
import mpips.torch
from tests.mpi.mpips.support import need, run
from tests.pages import failed_examples

TABLES = ("Embedding", "EmbeddingBag", "EmbeddingBagCollection", "TableOptimizer")
STORES = ("init", "pull", "pushpull")
COLLECTIVES = ("allgather", "allreduce", "alltoall", "barrier", "broadcast", "reduce_scatter")


@pytest.mark.parametrize("name", sorted({*mpips.torch.__all__} - {*TABLES}))
def test_the_example_of_torch(name: str) -> None:
    assert not failed_examples(getattr(mpips.torch, name), mpips=mpips, torch=torch)


@pytest.mark.parametrize("name", TABLES)
def test_the_example_of_a_table(name: str) -> None:
    need(1, servers=1)
    call = getattr(mpips.torch, name)
    assert not run("dist_sync", lambda kv: failed_examples(call, mpips=mpips, torch=torch, kv=kv), servers=1)


@pytest.mark.parametrize("name", [*STORES, *COLLECTIVES])
def test_the_example_of_jax(name: str) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'mpips[jax]'")
    import mpips.jax

    assert {*mpips.jax.__all__} == {*STORES, *COLLECTIVES}
    names = {"mpips": mpips, "jnp": jax.numpy}
    call = getattr(mpips.jax, name)
    if name in STORES:
        assert not run("mpi_sync", lambda kv: failed_examples(call, kv=kv, **names))
    else:
        assert not failed_examples(call, **names)
