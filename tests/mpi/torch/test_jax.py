"""JAX: collectives and stores inside `jit` and outside, their gradients and batches, in the order of the program."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'mpips[jax]'")

from jax.experimental import io_callback  # noqa: E402

import collectives  # noqa: E402
import mpips.jax  # noqa: E402
from collectives import communicator as communicators  # noqa: E402
from tests.mpi.jobs import job  # noqa: E402
from tests.mpi.sizes import only_on  # noqa: E402
from tests.mpi.torch.support import WORLD  # noqa: E402

LIMIT = 60
ENDS = """
import os, signal, sys, jax, mpips.jax
from mpi4py import MPI
total = jax.jit(lambda x: mpips.jax.allreduce(x))
x = jax.numpy.ones(100_000)
for step in range(10):
    if step == 5 and MPI.COMM_WORLD.rank == 1:
        {end}
    x = jax.block_until_ready(total(x))
"""
PLACE = """
import jax, mpips.jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize()
print(f"process {jax.process_index()} of {jax.process_count()}", flush=True)
jax.distributed.shutdown()
"""
OLD = """
import logging, jax
del jax.ffi
import mpips, mpips.jax
from mpi4py import MPI
logging.basicConfig(format="%(name)s: %(message)s")
rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
kv = mpips.create("mpi_sync")
mpips.jax.init(kv, "w", [jax.numpy.zeros(3)])

@jax.jit
def step(x):
    mean = mpips.jax.allreduce({"x": x})["x"]
    every = mpips.jax.allgather(x[0])
    weights, = mpips.jax.pushpull(kv, "w", [x])
    return mean, every, weights

mean, every, weights = step(jax.numpy.full(3, 1.0 + rank))
assert mean.tolist() == [(1 + ranks) / 2] * 3, mean
assert every.tolist() == [1.0 + r for r in range(ranks)], every
assert weights.tolist() == [ranks * (ranks + 1) / 2] * 3, weights
kv.close()
try:
    jax.grad(lambda x: mpips.jax.allreduce(x).sum())(jax.numpy.ones(2))
except ValueError as error:
    print(f"rank {rank}: {error}", flush=True)
"""


def test_an_allreduce_inside_jit() -> None:
    @jax.jit
    def mean(tree: dict) -> dict:
        return mpips.jax.allreduce({name: value * 2 for name, value in tree.items()})

    found = mean({"a": jax.numpy.full((3, 2), float(WORLD.rank)), "b": jax.numpy.asarray(float(WORLD.rank))})
    off = max(float(np.abs(np.asarray(value) - (WORLD.size - 1)).max()) for value in found.values())
    everybody = WORLD.allgather(off)
    assert max(everybody) == 0


def test_a_store_inside_jit() -> None:
    tree = {"w": jax.numpy.zeros((4, 3)), "b": jax.numpy.ones(2)}
    kv = mpips.create("mpi_sync")
    mpips.jax.init(kv, "model", tree)
    step = jax.jit(lambda gradients: mpips.jax.pushpull(kv, "model", gradients))
    found = jax.block_until_ready(step({"w": jax.numpy.ones((4, 3)), "b": jax.numpy.ones(2)}))
    kv.close()
    everybody = WORLD.allgather([float(np.asarray(found[name]).mean()) for name in "wb"])
    assert all(each == [float(WORLD.size)] * 2 for each in everybody)


def test_an_optax_step() -> None:
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(0.1)

    @jax.jit
    def step(weights, state, x):
        gradients = jax.grad(lambda w: ((w * x - 1) ** 2).mean())(weights)
        updates, state = optimizer.update(mpips.jax.allreduce(gradients), state)
        return optax.apply_updates(weights, updates), state

    weights = jax.numpy.zeros(3)
    state = optimizer.init(weights)
    for number in range(5):
        weights, state = step(weights, state, jax.numpy.full(3, 1.0 + WORLD.rank + number))
    everybody = WORLD.allgather(np.asarray(weights).tolist())
    assert all(each == everybody[0] for each in everybody)


@pytest.mark.parametrize(
    ("op", "dtype", "words"),
    [
        ("foo", "float32", "unknown operation 'foo': choose one of"),
        ("mean", "int32", "the mean of int32 elements is not int32: use op='sum'"),
        ("sum", "bool", "cannot reduce elements of type bool: use"),
        (3, "float32", "op 3 is of type int: pass one of"),
    ],
)
def test_an_operation_that_does_not_fit_is_refused_when_traced(op: str, dtype: str, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        jax.make_jaxpr(lambda x: mpips.jax.allreduce({"x": x}, op))(jax.numpy.ones(3, dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "uint32", "int32", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 2), (70000,)])
def test_sums_keep_types_and_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    found = jax.jit(lambda x: mpips.jax.allreduce(x, "sum"))(jax.numpy.full(shape, WORLD.rank + 1, dtype))
    right = found.dtype == dtype and found.shape == shape
    everybody = WORLD.allgather(bool(right and (np.asarray(found) == WORLD.size * (WORLD.size + 1) // 2).all()))
    assert all(everybody)


@pytest.mark.parametrize(("op", "wanted"), [("min", WORLD.size == 1), ("max", True)])
def test_truth_is_all_or_any(op: str, wanted: bool) -> None:
    found = mpips.jax.allreduce(jax.numpy.asarray([WORLD.rank == 0, False]), op)
    assert WORLD.allgather(np.asarray(found).tolist()) == [[wanted, False]] * WORLD.size


FAMILY: dict[str, tuple[Callable[[Any], Any], Callable[[Any, int], Any]]] = {
    "sum": (lambda x: mpips.jax.allreduce(x, "sum"), lambda xs, r: xs.sum(0)),
    "mean": (mpips.jax.allreduce, lambda xs, r: xs.mean(0)),
    "broadcast": (lambda x: mpips.jax.broadcast(x, WORLD.size - 1), lambda xs, r: xs[-1]),
    "allgather": (mpips.jax.allgather, lambda xs, r: xs),
    "reduce_scatter": (mpips.jax.reduce_scatter, lambda xs, r: xs.sum(0)[r]),
    "scattered mean": (lambda x: mpips.jax.reduce_scatter(x, "mean"), lambda xs, r: xs.mean(0)[r]),
    "alltoall": (mpips.jax.alltoall, lambda xs, r: xs[:, r]),
}
"""Each call, and what it gives rank r of all ranks' arrays."""


def arrays(*shape: int) -> Any:
    """Return all ranks' arrays, alike on all ranks."""
    return jax.numpy.asarray(np.random.default_rng(3).normal(size=(WORLD.size, *shape)).astype("float32"))


@pytest.mark.parametrize("name", FAMILY)
def test_the_family_and_its_gradients_equal_one_process(name: str) -> None:
    call, model = FAMILY[name]
    xs, r = arrays(WORLD.size, 3), WORLD.rank
    found, back = jax.vjp(call, xs[r])
    weights = np.arange(found.size * WORLD.size, dtype="float32").reshape(WORLD.size, *found.shape)
    loss = lambda xs: sum((model(xs, rank) * weights[rank]).sum() for rank in range(WORLD.size))  # noqa: E731
    wanted = jax.grad(loss)(xs)[r]
    ahead = jax.jvp(call, (xs[r],), (2 * xs[r],))[1]
    close = [
        np.allclose(found, model(xs, r), atol=1e-5),
        np.allclose(back(weights[r])[0], wanted, atol=1e-4),
        np.allclose(ahead, model(2 * xs, r), atol=1e-5),
    ]
    assert WORLD.allgather(close) == [[True] * 3] * WORLD.size


@pytest.mark.parametrize("name", ["sum", "mean", "broadcast", "allgather"])
def test_the_identity_takes_its_own_cotangent(name: str) -> None:
    call = {
        "sum": lambda x: mpips.jax.allreduce(x, "sum", gradient="identity"),
        "mean": lambda x: mpips.jax.allreduce(x, gradient="identity"),
        "broadcast": lambda x: mpips.jax.broadcast(x, gradient="identity"),
        "allgather": lambda x: mpips.jax.allgather(x, gradient="identity"),
    }[name]
    found = jax.jit(jax.grad(lambda x: (call(x) ** 2).sum()))(jax.numpy.full(2, 3.0))
    wanted = {"sum": 6.0 * WORLD.size, "mean": 6.0 / WORLD.size, "broadcast": 6.0 * (WORLD.rank == 0), "allgather": 6.0}
    everybody = WORLD.allgather(np.asarray(found).tolist() == pytest.approx([wanted[name]] * 2))
    assert all(everybody)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", FAMILY)
def test_a_batch_is_one_call(name: str, axis: int) -> None:
    call, model = FAMILY[name]
    shape = [WORLD.size, 3]
    shape.insert(axis, 4)
    xs, r = arrays(*shape), WORLD.rank
    found = jax.vmap(call, in_axes=axis)(xs[r])
    wanted = jax.vmap(lambda xs: model(xs, r), in_axes=axis + 1)(xs)
    batched = jax.make_jaxpr(jax.vmap(call, in_axes=axis))(xs[r])
    calls = [equation for equation in batched.eqns if equation.primitive.name == "mpips_call"]
    everybody = WORLD.allgather(bool(np.allclose(found, wanted, atol=1e-5)) and len(calls) == 1)
    assert all(everybody)


def test_what_has_no_gradient_says_so() -> None:
    with pytest.raises(NotImplementedError, match="allreduce with op='max' has no gradient: call it outside"):
        jax.grad(lambda x: mpips.jax.allreduce(x, "max").sum())(jax.numpy.ones(3))
    with pytest.raises(ValueError, match="unknown gradient 'mean': choose one of sum, identity"):
        mpips.jax.allreduce(1.0, gradient="mean")


def test_rows_that_are_not_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match=f"alltoall of an array of shape .*must have length {WORLD.size}"):
        mpips.jax.alltoall(jax.numpy.ones((WORLD.size + 1, 2)))


def test_independent_calls_run_in_order() -> None:
    """Nothing but the order of the program tells these apart: where XLA ran them as it liked, ranks would mismatch."""

    @jax.jit
    def many(x: Any) -> Any:
        sums = [mpips.jax.allreduce((x + n)[: 10 * n + 1], "sum") for n in range(20)]
        first = jax.lax.cond(x[0] > -1, lambda y: mpips.jax.allreduce(y, "max"), lambda y: y, x)
        return [one.sum() for one in sums], first, mpips.jax.broadcast(x[:3])

    x = jax.numpy.zeros(300)
    for _ in range(20):  # not waited for: programs, too, follow each other
        sums, _, _ = many(x)
        other = jax.jit(lambda x: mpips.jax.allgather(x).sum())(x)  # traced anew
    found = [float(one) for one in sums] == [WORLD.size * n * (10 * n + 1) for n in range(20)] and float(other) == 0
    assert all(WORLD.allgather(found))


def test_loops_branches_and_remat() -> None:
    def step(x: Any, _: Any) -> tuple[Any, Any]:
        return jax.numpy.sin(mpips.jax.allreduce(x)), None

    def wave(x: Any, mean: Any) -> Any:
        for _ in range(3):
            x = jax.numpy.sin(mean(x))
        return x.sum()

    scan = lambda x: jax.lax.scan(step, x, None, length=3)[0].sum()  # noqa: E731
    remat = lambda x: wave(x, jax.checkpoint(mpips.jax.allreduce))  # noqa: E731
    loop = lambda x: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (step(c[0], 0)[0], c[1] + 1), (x, 0))[0]  # noqa: E731
    x = jax.numpy.linspace(0.1, 0.9, 5)  # alike on all ranks: the mean changes nothing
    wanted = jax.value_and_grad(lambda x: wave(x, lambda x: x))(x)
    found = [jax.jit(jax.value_and_grad(f))(x) for f in (scan, remat)]
    close = [np.allclose(a, b, atol=1e-6) for one in found for a, b in zip(one, wanted)]
    close.append(np.allclose(jax.jit(loop)(x).sum(), wanted[0], atol=1e-6))
    assert all(WORLD.allgather(all(close)))


def test_a_donated_array_is_summed_in_place() -> None:
    x = jax.numpy.full(1 << 16, 1.0) + WORLD.rank
    place = x.unsafe_buffer_pointer()
    found = jax.jit(lambda x: mpips.jax.allreduce(x, "sum"), donate_argnums=0)(x)
    right = found.unsafe_buffer_pointer() == place and float(found[0]) == WORLD.size * (WORLD.size + 1) / 2
    assert all(WORLD.allgather(right))


def test_an_array_that_is_read_again_stays() -> None:
    x = jax.numpy.full(1 << 16, 1.0) + WORLD.rank
    total, twice = jax.jit(lambda x: (mpips.jax.allreduce(x, "sum"), x * 2))(x)
    right = float(x[5]) == WORLD.rank + 1 and float(twice[7]) == 2 * WORLD.rank + 2
    assert all(WORLD.allgather(right and float(total[0]) == WORLD.size * (WORLD.size + 1) / 2))


def test_ranks_of_a_communicator_alone() -> None:
    half = WORLD.Split(WORLD.rank % 2)
    found = jax.jit(lambda x: mpips.jax.allreduce(x, "sum", half))(jax.numpy.float32(1))
    mpips.jax.barrier(half)
    everybody = WORLD.allgather(float(found) == half.size)
    half.Free()
    assert all(everybody)


@pytest.mark.skipif(WORLD.size == 1, reason="one rank has nobody to differ from")
def test_all_ranks_raise_where_arrays_differ() -> None:
    comm = WORLD.Dup()
    said = ""
    try:
        jax.block_until_ready(mpips.jax.allreduce(jax.numpy.ones(3 + (WORLD.rank == 1)), "sum", comm))
        jax.effects_barrier()
    except jax.errors.JaxRuntimeError as error:
        said = str(error)
    everybody = WORLD.allgather(said)
    again = float(jax.jit(lambda x: mpips.jax.allreduce(x, "sum"))(jax.numpy.float32(1)))
    assert all("allreduce of 3 float32" in one and "4 float32" in one for one in everybody), everybody
    assert WORLD.allgather(again) == [WORLD.size] * WORLD.size


@pytest.mark.parametrize("known", [False, True], ids=["begins so", "was made before"])
def test_a_step_under_way_beside_the_programs_own_calls(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank the step's call comes after the program's, on the others before: each meets its own kind."""
    comm, total = WORLD.Dup(), WORLD.size * (WORLD.size + 1) / 2
    if known:  # before JAX was imported
        monkeypatch.setattr(communicators, "_threads_expected", False)
        collectives.allreduce(np.ones(1), comm)
        monkeypatch.undo()
    called, step_comes = threading.Event(), threading.Event()

    def come(x: np.ndarray) -> np.ndarray:
        step_comes.set()
        if WORLD.rank == 0:
            called.wait(LIMIT)
        return x

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return mpips.jax.allreduce(io_callback(come, x, x), "sum", comm)

    wrong = []
    for turn in range(5):
        called.clear()
        step_comes.clear()
        found, mine = list[float](), np.full(4, 100.0, np.float32)
        under_way = threading.Thread(target=lambda to=found: to.extend(step(jax.numpy.full(4, WORLD.rank + 1.0))))
        under_way.start()  # XLA would run so short a step in this thread
        step_comes.wait(LIMIT)
        collectives.allreduce(mine, comm)
        called.set()
        under_way.join(LIMIT)
        if found != [total] * 4 or mine.tolist() != [100.0 * WORLD.size] * 4:
            wrong.append((turn, found, mine))
    everybody = WORLD.allgather(wrong)
    comm.Free()
    assert not any(everybody), everybody


def test_two_threads_on_communicators_of_their_own() -> None:
    """One rank dispatches the one first, the others the other: no call waits for one that cannot end before it."""
    comms = [WORLD.Dup(), WORLD.Dup()]
    steps = [jax.jit(lambda x, comm=comm: mpips.jax.allreduce(x, "sum", comm)) for comm in comms]
    found: dict[int, float] = {}
    for step in steps:
        step(jax.numpy.ones(1)).block_until_ready()
    WORLD.Barrier()

    def run(place: int) -> None:
        found[place] = float(steps[place](jax.numpy.full(1, place + 1.0))[0])

    threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
    for thread in threads if WORLD.rank == 0 else reversed(threads):
        thread.start()
        thread.join(0.1)  # it has begun, and can end only with the other rank's
    for thread in threads:
        thread.join(LIMIT)
    everybody = WORLD.allgather(found)
    for comm in comms:
        comm.Free()
    assert everybody == [{0: WORLD.size, 1: 2 * WORLD.size}] * WORLD.size


@pytest.mark.skipif(WORLD.size == 1, reason="one rank has nobody to differ from")
def test_renew_serves_calls_of_jax_too() -> None:
    comm, said = WORLD.Dup(), []
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError) as error:
            jax.block_until_ready(mpips.jax.allreduce(jax.numpy.ones(3 + (WORLD.rank == 1)), "sum", comm))
        said.append("4 float32" in str(error.value))
        own = collectives.allreduce(np.ones(1), comm)[0]  # the program's calls go on
        collectives.renew(comm)
        found = float(mpips.jax.allreduce(jax.numpy.float32(1), "sum", comm))
        said.append((own, found) == (WORLD.size, WORLD.size))
    everybody = WORLD.allgather(said)
    comm.Free()
    assert all(map(all, everybody)), everybody


@only_on(1)
@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 (worker) was ended by SIGKILL"),
        ("raise ValueError('mine')", "mpips: ValueError on rank 1 of 3"),
        ("sys.exit()", "rank 1 is needed, and its program has ended"),
        ("x = x[1:]", "rank 1 calls allreduce of 99999 float32"),
    ],
)
def test_all_ranks_end_by_a_sentence(end: str, words: str, tmp_path: Path) -> None:
    done = job(tmp_path, ENDS.format(end=end), "-w 3")
    assert done.returncode != 0 and words in done.stdout + done.stderr


@only_on(1)
def test_jax_finds_its_processes(tmp_path: Path) -> None:
    done = job(tmp_path, PLACE, "-w 2")
    assert done.returncode == 0 and {"process 0 of 2", "process 1 of 2"} <= set(done.stdout.splitlines()), done.stderr


@only_on(1)
def test_a_jax_without_foreign_functions_falls_back_to_callbacks(tmp_path: Path) -> None:
    done = job(tmp_path, OLD, "-w 2")
    assert done.returncode == 0, done.stderr
    assert "XLA's foreign function interface" in done.stderr and "callbacks" in done.stderr
    assert done.stdout.count("do not support JVP") == 2, done.stdout
