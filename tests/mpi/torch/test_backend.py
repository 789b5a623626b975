"""The backend of torch.distributed: calls beside gloo's, groups, progress beside compute, and what is refused."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import collectives
from tests.mpi.torch import conformance
from tests.mpi.torch.support import WORLD, alike, batch, groups, heard, network, several

CHOSEN = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SHAPES = ((7,), (0,), (3, 5), (1025,))
"""The longest is freed at once where nobody holds it, and written over."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with groups():
        yield


GROUPS = [list(range(WORLD.size)), *([rank, rank + 1] for rank in range(1, WORLD.size - 1)), [WORLD.size - 1]]
"""All ranks, then groups that overlap."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", GROUPS if WORLD.size > 1 else GROUPS[:1], ids=str)
def test_calls_give_what_gloo_s_give(ranks: list[int]) -> None:
    ours, theirs = dist.new_group(ranks, backend="mpips"), dist.new_group(ranks, backend="gloo")
    if WORLD.rank not in ranks:
        return
    chosen = [cell for cell in conformance.cells(ranks, CHOSEN) if cell.shape in SHAPES]
    wrong = [
        (*cell[:3], said)
        for cell in chosen
        if (said := conformance.verdict(cell, ours, theirs)) not in conformance.FINE
    ]
    assert not wrong


@several
@pytest.mark.filterwarnings("ignore")
def test_wrong_arguments_are_runtime_errors_as_gloo_s() -> None:
    """Programs ask by `except RuntimeError` what a backend can do, and go on with the group."""
    found: dict[str, list[str]] = {}
    for backend in ("mpips", "gloo"):
        group = dist.new_group(backend=backend)
        for name, call in conformance.wrong_calls(group).items():
            try:
                call()
                said = "works"
            except RuntimeError:
                said = "refused"
            except Exception as error:
                said = repr(error)
            found.setdefault(name, []).append(said)
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        found[f"{backend} goes on"] = [str(x.tolist() == [WORLD.size] * 2)]
    goes_on = [found.pop(f"{backend} goes on") for backend in ("mpips", "gloo")]
    assert {name: both for name, both in found.items() if both != ["refused", "refused"]} == {}
    assert goes_on == [["True"], ["True"]]


@several
def test_an_input_that_is_not_contiguous_is_refused_as_by_gloo() -> None:
    x = torch.ones(WORLD.size, WORLD.size).t()
    for group in (None, dist.new_group(backend="gloo")):
        with pytest.raises(ValueError, match="Tensors must be contiguous"):
            dist.all_to_all_single(torch.empty_like(x.contiguous()), x, group=group)


@pytest.mark.filterwarnings("ignore")
def test_groups_count_their_collectives() -> None:
    """As gloo's, but for sends and receives, which not all ranks make."""
    found = []
    for backend in ("mpips", "gloo"):
        group, counts = dist.new_group(backend=backend), []
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(3)]
        counts.append(group._get_sequence_number_for_group())
        for work in works:
            work.wait()
        dist.barrier(group)
        dist.broadcast(torch.ones(1), 0, group)
        dist.all_gather([torch.ones(1) for _ in range(WORLD.size)], torch.ones(1), group)
        counts.append(group._get_sequence_number_for_group())
        found.append(counts)
        if backend == "mpips":
            assert [work._get_sequence_number() for work in works] == [1, 2, 3]
    assert found == [[3, 6], [3, 6]]


def test_works_stand_in_the_registry_until_they_are_waited_for() -> None:
    """Compiled code waits for a collective that the program began, by the tensor alone."""
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    count, x, sizes = torch._C._distributed_c10d._get_work_registry_size, torch.ones(1), []
    with functional.allow_inflight_collective_as_graph_input_ctx():
        work = dist.all_reduce(x, async_op=True)
        sizes.append(count())
        work.wait()
        sizes.append(count())
        dist.all_reduce(x, async_op=True)
        torch.ops._c10d_functional.wait_tensor(x)
        sizes.append(count())
    assert sizes == [1, 0, 0] and x == WORLD.size**2


class Pair(Tensor):
    """Two tensors behind one, without memory of its own; each operator runs on the first, then on the second."""

    @staticmethod
    def __new__(cls, value: float) -> Pair:
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

    def __init__(self, value: float) -> None:
        self.a, self.b = torch.full((2,), float(value)), torch.full((2,), float(value + 100))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func(*tree_map_only(cls, lambda each: each.a, args), **(kwargs or {}))
        return func(*tree_map_only(cls, lambda each: each.b, args), **(kwargs or {}))


def test_subclasses_hand_on_the_tensors_that_they_are_made_of() -> None:
    """Results of functional collectives, and a tensor of two, have no memory of their own."""
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    rank, size = WORLD.rank, WORLD.size
    x = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    dist.all_reduce(x)
    moved, part, given = Pair(rank), Pair(-1), [Pair(10 + each) for each in range(size)]
    every = [Pair(-1) for _ in range(size)]
    dist.broadcast(moved, size - 1)
    dist.scatter(part, given if rank == 0 else None, 0)
    work = dist.all_gather(every, Pair(rank), async_op=True)
    work.wait()
    values = [(float(each.a[0]), float(each.b[-1])) for each in (moved, part, *every)]
    expected = [size - 1, 10 + rank, *range(size)]
    assert x.tolist() == [size**2] * 3 and values == [(value, value + 100) for value in expected]


@pytest.mark.filterwarnings("ignore")
def test_modes_hear_of_collectives_as_on_gloo() -> None:
    """CommDebugMode counts them, and is the only mode afterwards."""
    debug = pytest.importorskip("torch.distributed.tensor.debug")
    found = []
    for backend in ("mpips", "gloo"):
        group, x, mode = dist.new_group(backend=backend), torch.full((2,), WORLD.rank + 1.0), debug.CommDebugMode()
        every, part = [torch.zeros(2) for _ in range(WORLD.size)], torch.zeros(2)
        with mode:
            dist.all_reduce(x, group=group)
            dist.all_gather(every, x, group)
            dist.scatter(part, every if WORLD.rank == 0 else None, 0, group)
            dist.all_to_all_single(torch.zeros(WORLD.size), torch.ones(WORLD.size), group=group)
            dist.barrier(group)
        x += len(torch.utils._python_dispatch._get_current_dispatch_mode_stack())
        counts = {str(kind): count for kind, count in mode.get_comm_counts().items()}
        found.append((counts, x.tolist(), part.tolist()))
    assert found[0] == found[1] and sum(found[0][0].values()) >= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("entries", [0, 5])
@pytest.mark.parametrize("async_op", [False, True])
def test_sparse_tensors_sum_as_gloo_s(dtype: Any, entries: int, async_op: bool) -> None:
    """Rank 0 may have no entries; indices repeat, within a rank and between ranks."""
    generator = torch.Generator().manual_seed(WORLD.rank)
    count = WORLD.rank and entries + WORLD.rank
    indices = torch.randint(3, (2, count), generator=generator)
    values = (10 * torch.randn(count, 4, generator=generator)).to(dtype)
    sums = []
    for backend in ("mpips", "gloo"):
        x = torch.sparse_coo_tensor(indices.clone(), values.clone(), (3, 3, 4), check_invariants=True)
        work = dist.all_reduce(x, group=dist.new_group(backend=backend), async_op=async_op)
        if work is not None:
            work.wait()
        sums.append(x)
    ours, theirs = sums
    assert ours.is_coalesced() and torch.equal(ours.indices(), theirs.coalesce().indices())
    assert torch.equal(ours.values(), theirs.coalesce().values())


def test_a_single_element_may_have_any_stride() -> None:
    x = torch.full((4, 3), float(WORLD.rank), dtype=torch.complex64)[:1, 1:].t()[:1, :1].as_strided((1,), (7,))
    every = [torch.zeros(1, dtype=x.dtype) for _ in range(WORLD.size)]
    dist.all_gather(every, x)
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.int64), torch.ones(2), (3,))
    dist.all_reduce(sparse)
    dist.all_reduce(x)
    assert every[-1].real == WORLD.size - 1 and x.real == sum(range(WORLD.size))
    assert sparse.to_dense().tolist() == [2.0 * WORLD.size, 0.0, 0.0]


@several
@pytest.mark.parametrize("given", ["shape", "dense"])
def test_all_raise_where_sparse_tensors_differ(given: str) -> None:
    own, begin = dist.new_group(backend="mpips"), time.monotonic()
    x = torch.ones(3 + (WORLD.rank == 1 and given == "shape"), 2)
    said = heard(lambda: dist.all_reduce(x if WORLD.rank == 1 and given == "dense" else x.to_sparse(), group=own))
    assert ("(4, 2)" in said or given == "dense") and alike(said) and "Mismatch" in said
    assert time.monotonic() - begin < 10


@several
def test_a_monitored_barrier_without_a_second_s_patience_raises() -> None:
    own, said = dist.new_group(backend="mpips"), ""
    if WORLD.rank == 0:
        said = heard(lambda: own.monitored_barrier(timedelta(0)))
    WORLD.Barrier()
    assert WORLD.rank or ("barrier" in said and "not come" in said)


@several
def test_a_timeout_that_is_set_later_applies() -> None:
    own, said, begin = dist.new_group(backend="mpips"), "", time.monotonic()
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timedelta(seconds=1), own)
    else:
        own.set_timeout(timedelta(seconds=1))
    if WORLD.rank == 0:
        said = heard(lambda: dist.all_reduce(torch.ones(3), group=own))
    WORLD.Barrier()
    assert WORLD.rank or ("not come" in said and 0.9 < time.monotonic() - begin < 20), said


@several
def test_a_wait_with_a_timeout_may_be_repeated() -> None:
    own, total, said = dist.new_group(backend="mpips"), torch.ones(3), ""
    if WORLD.rank == 0:
        work = dist.all_reduce(total, group=own, async_op=True)
        said = heard(lambda: work.wait(timedelta(seconds=0.2)))
        WORLD.Barrier()
        work.wait(timedelta(seconds=60))
    else:
        WORLD.Barrier()
        dist.all_reduce(total, group=own)
    assert total.tolist() == [WORLD.size] * 3
    assert WORLD.rank or "has not ended in 0.2 s" in said


def test_a_callback_may_wait_for_an_operation_that_began_before() -> None:
    first = dist.all_reduce(torch.ones(3), async_op=True)
    total = torch.ones(3)
    second = dist.all_reduce(total, async_op=True)
    waited = first.get_future().then(lambda _: [second.wait(), second.wait(timedelta(seconds=60))]).wait()
    assert waited == [True, True] and total.tolist() == [WORLD.size] * 3


@pytest.mark.parametrize("hook", ["register_pre_hook", "register_post_hook", "register_abort_hook"])
def test_a_hook_that_would_never_run_is_refused(hook: str) -> None:
    assert f"{hook}: mpips would never call the hook" in heard(lambda: getattr(dist.group.WORLD, hook)(1, print))


def test_parts_of_a_sum_may_be_of_unlike_sizes() -> None:
    part = torch.zeros(WORLD.rank + 1)
    dist.reduce_scatter(part, [torch.full((rank + 1,), 10.0**rank) for rank in range(WORLD.size)])
    assert part.tolist() == [10.0**WORLD.rank * WORLD.size] * (WORLD.rank + 1)


def test_an_operation_ends_beside_compute() -> None:
    """This thread never waits for it, and only computes."""
    x = torch.ones(1 << 16)
    work = dist.all_reduce(x, async_op=True)
    compute, until = torch.ones(64, 64), time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < until:
        compute = compute @ compute * 1e-2
    done = work.is_completed()
    work.wait()
    assert done and float(x.sum()) == WORLD.size * x.numel()


def test_operations_end_in_the_order_of_their_begin() -> None:
    x = torch.ones(1000)
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    dist.all_reduce(x)
    for work in works:
        work.wait()
    assert (x == WORLD.size**4).all()


def test_a_callback_may_wait_for_an_operation() -> None:
    """Two callbacks, as PowerSGD's hook has them, while an operation of another group is under way."""
    other, y, z = dist.new_group(backend="mpips"), torch.ones(1000), torch.ones(10)

    def sum_again(future: Any) -> Any:
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    beside = dist.all_reduce(z, group=other, async_op=True)
    first = dist.all_reduce(y, async_op=True).get_future()
    found = first.then(sum_again).then(lambda future: sum_again(first)).wait()
    beside.wait()
    assert (found == WORLD.size**3).all() and (z == WORLD.size).all()


def begun(call: str, x: Tensor, group: Any) -> tuple[Any, Callable[[], Any]]:
    """Begin a call in a group of two. Return its work, and what reads the sum of both ranks' values from its result."""
    if call == "barrier":
        return dist.barrier(group, async_op=True), lambda: None
    if call == "sparse":
        sparse = x.to_sparse()
        return dist.all_reduce(sparse, group=group, async_op=True), lambda: sparse.to_dense()[-1]
    if not call.startswith("coalesced"):
        return dist.all_reduce(x, group=group, async_op=True), lambda: x[-1]
    every, part = torch.zeros(2 * len(x)), torch.zeros(len(x) // 2)
    with dist._coalescing_manager(group, async_ops=True) as works:
        if call == "coalesced all_gather":
            dist.all_gather_into_tensor(every, x, group)
        elif call == "coalesced reduce_scatter":
            dist.reduce_scatter_tensor(part, x, group=group)
        else:
            dist.all_reduce(x, group=group)
    found = {"coalesced all_gather": lambda: every[0] + every[-1], "coalesced reduce_scatter": lambda: part[-1]}
    return works, found.get(call, lambda: x[-1])


@pytest.mark.parametrize(
    "call",
    [
        "all_reduce",
        "sparse",
        "coalesced all_reduce",
        "coalesced all_gather",
        "coalesced reduce_scatter",
        "barrier",
        "send",
    ],
)
def test_groups_overlap_in_an_order_of_each_rank(call: str) -> None:
    """Pairs of neighbours on a ring, of which every rank begins with another; as on gloo and NCCL, all end."""
    if WORLD.size < 3:
        pytest.skip("groups of two overlap on three ranks")
    pairs = [sorted((rank, (rank + 1) % WORLD.size)) for rank in range(WORLD.size)]
    ring = [dist.new_group(pair, backend="mpips") for pair in pairs]
    right, left = ring[WORLD.rank], ring[WORLD.rank - 1]
    totals = [float(sum(pairs[WORLD.rank])), float(sum(pairs[WORLD.rank - 1]))]
    begin, fine = time.monotonic(), True
    for _ in range(3):
        mine = [torch.full((1000,), float(WORLD.rank)) for _ in range(2)]
        under_way = [begun(call, x, group) for x, group in zip(mine, (right, left))]
        if call == "send":  # a message goes beside a collective that waits for its receiver
            sent = dist.isend(mine[0], (WORLD.rank + 1) % WORLD.size)
            dist.recv(torch.empty(1000), (WORLD.rank - 1) % WORLD.size)
            sent.wait()
        for (work, found), total in zip(under_way, totals):
            work.wait()
            fine = fine and found() in (None, total)
    assert fine and time.monotonic() - begin < 20


def test_threads_use_groups_of_their_own() -> None:
    """Each rank pauses at places of its own, so that ranks come to both groups in different orders."""
    found: dict[str, list[float]] = {"main": [], "other": []}

    def sum_ranks(name: str, group: Any) -> None:
        pauses = random.Random(f"{name} {WORLD.rank}")
        for _ in range(30):
            time.sleep(pauses.choice([0, 0, 0.002]))
            x = torch.full((100,), float(WORLD.rank))
            dist.all_reduce(x, group=group)
            found[name].append(float(x[-1]))

    mine, other = dist.new_group(backend="mpips"), dist.new_group(backend="mpips")
    for _ in range(3):
        thread = threading.Thread(target=sum_ranks, args=("other", other))
        thread.start()
        sum_ranks("main", mine)
        thread.join()
    assert found["main"] == found["other"] == [float(sum(range(WORLD.size)))] * 90


def test_collectives_of_the_program_go_beside_the_backend_s_thread() -> None:
    """The same kind and size. Each rank begins those on MPI's world and those of the group in its own order."""
    pauses, other = random.Random(WORLD.rank), dist.new_group(backend="mpips")
    found: set[tuple[float, ...]] = set()
    for _ in range(60):
        x, y, z = (torch.full((100,), scale * (WORLD.rank + 1.0)) for scale in (1, 10, 100))
        works = []
        if pauses.random() < 0.5:
            works.append(dist.all_reduce(x, async_op=True))
        collectives.allreduce(z)
        if not works:
            works.append(dist.all_reduce(x, async_op=True))
        works.append(dist.all_reduce(y, group=other, async_op=True))
        time.sleep(pauses.choice([0, 0.001]))
        WORLD.Barrier()  # MPI's own call, on the communicator of the program
        for work in works:
            work.wait()
        found |= {(float(x.min()), float(y.max()), float(z.min()), float(z.max()))}
    total = float(sum(range(1, WORLD.size + 1)))
    assert found == {(total, 10 * total, 100 * total, 100 * total)}


def test_a_receive_from_any_rank_names_its_sender() -> None:
    if WORLD.rank == 0:
        x, senders = torch.zeros(2), []
        for _ in range(1, WORLD.size):
            senders.append(dist.recv(x))
            assert x.tolist() == [float(senders[-1])] * 2
        assert sorted(senders) == list(range(1, WORLD.size))
    else:
        dist.send(torch.full((2,), float(WORLD.rank)), 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8])
def test_means_of_integers_are_divided_toward_0(dtype: Any) -> None:
    """As NCCL's; and what Lightning makes of gloo's sum."""
    sign = 1 if dtype is torch.uint8 else -1
    mine, whole = sign * (2 * WORLD.rank + 5), sign * sum(2 * rank + 5 for rank in range(WORLD.size))
    x, strided = torch.full((3,), mine, dtype=dtype), torch.full((2, 3), mine, dtype=dtype).t()
    own, alone = torch.full((3,), mine, dtype=dtype), torch.zeros(1, dtype=dtype)
    group = [torch.full((2,), mine, dtype=dtype), torch.full((1,), mine, dtype=dtype)]
    dist.all_reduce(x, ReduceOp.AVG)
    dist.all_reduce(strided, ReduceOp.AVG)
    dist.reduce(own, 0, ReduceOp.AVG)
    dist.reduce_scatter_tensor(alone, torch.full((WORLD.size,), mine, dtype=dtype), ReduceOp.AVG)
    dist.all_reduce_coalesced(group, ReduceOp.AVG)
    tensors = [x, strided, alone, *group, *([own] if WORLD.rank == 0 else [])]
    assert {value for tensor in tensors for value in tensor.flatten().tolist()} == {int(whole / WORLD.size)}


# ---- what is refused


@several
@pytest.mark.parametrize(
    ("rank", "size", "words"),
    [
        (0, WORLD.size, "rank is 0 on MPI's rank 1: leave rank"),
        (WORLD.rank, 5, f"world_size is 5, and MPI's is {WORLD.size}: leave rank"),
    ],
)
def test_a_place_that_is_not_mpi_s_is_refused(rank: int, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        next(rendezvous("env://", rank, size))
    with pytest.raises(ValueError, match=words):
        next(rendezvous(f"env://?rank={rank}&world_size={size}"))


def test_torchrun_s_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", str(WORLD.size + 1))
    with pytest.raises(RuntimeError, match="instead of torchrun"):
        dist.new_group(backend="mpips")


@several
@pytest.mark.parametrize("async_op", [False, True])
def test_all_raise_where_a_shape_differs(async_op: bool) -> None:
    own, begin = dist.new_group(backend="mpips"), time.monotonic()

    def call() -> None:
        work = dist.all_reduce(torch.ones(3 + (WORLD.rank == 1)), group=own, async_op=async_op)
        if async_op:
            work.wait()

    assert "all" in heard(call) and time.monotonic() - begin < 10


@several
def test_ddp_raises_on_a_group_that_is_over() -> None:
    own = dist.new_group(backend="mpips")
    model = DistributedDataParallel(network(), process_group=own)
    first = heard(lambda: dist.all_reduce(torch.ones(3 + WORLD.rank), group=own))
    then = heard(lambda: model(batch(0)[0]).sum().backward())
    assert first and first.partition(": ")[2] in then
    assert alike(bool(first))


@several
@pytest.mark.parametrize("call", ["all_to_all", "gather", "bitwise"])
@pytest.mark.parametrize("async_op", [False, True])
def test_all_raise_where_one_calls_something_else(call: str, async_op: bool) -> None:
    """These calls are MPI's own, in which a rank would wait for ever for one that is elsewhere."""
    own, begin = dist.new_group(backend="mpips"), time.monotonic()
    x, every = torch.ones(WORLD.size, dtype=torch.int64), [torch.empty(WORLD.size, dtype=torch.int64)] * WORLD.size

    def start() -> Any:
        if WORLD.rank == 1:
            return dist.all_reduce(torch.ones(3), group=own, async_op=async_op)
        if call == "all_to_all":
            return dist.all_to_all_single(torch.empty_like(x), x, group=own, async_op=async_op)
        if call == "gather":
            return dist.gather(x, every if WORLD.rank == 0 else None, group=own, async_op=async_op)
        return dist.all_reduce(x, ReduceOp.BOR, group=own, async_op=async_op)

    said = heard(lambda: start().wait() if async_op else start())
    assert "let all ranks make the same call" in said and alike(said) and time.monotonic() - begin < 20
