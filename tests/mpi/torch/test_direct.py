"""`mpips.torch.all_reduce`, and synchronous calls of the process group, which take the same way."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import mpips
import mpips.torch
from collectives.kernels import engine
from tests.mpi.torch.support import WORLD, groups, several

P, RANK = WORLD.size, WORLD.rank
TOTAL = P * (P + 1) / 2


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with groups():
        yield


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64]
)
@pytest.mark.parametrize("call", ["mpips", "torch"])
def test_all_reduce_of_every_dtype_and_shape(dtype, call):
    reductions = {"sum": TOTAL, "min": 1, "max": P, "mean": TOTAL / P}
    wrong = []
    for op, wanted in reductions.items():
        if op == "mean" and not dtype.is_floating_point:
            continue
        for shape in ((), (1,), (3, 5), (0, 4), (70_000,)):
            tensor = torch.empty(shape, dtype=dtype)
            for turn in range(3):
                tensor.fill_(RANK + 1)
                if call == "mpips":
                    result = mpips.torch.all_reduce(tensor, op)
                else:
                    dist.all_reduce(tensor, getattr(dist.ReduceOp, {"mean": "AVG"}.get(op, op.upper())))
                    result = tensor
                if turn == 0:
                    engine.load_all()
                if result is not tensor or not torch.all(tensor == torch.tensor(wanted, dtype=dtype)):
                    wrong.append((op, shape, turn))
    assert not wrong


def test_a_tensor_that_gets_other_memory_or_strides_is_reduced_where_it_is():
    tensor, results = torch.full((4, 4), RANK + 1.0), []
    for change in (
        lambda: None,
        lambda: setattr(tensor, "data", torch.full((4, 4), RANK + 1.0)),
        lambda: tensor.t_().fill_(RANK + 1.0),
        lambda: setattr(tensor, "data", torch.full((8, 6), RANK + 1.0)[:, ::2]),
    ):
        change()
        mpips.torch.all_reduce(tensor)
        results.append(bool((tensor == TOTAL).all()))
        tensor.fill_(RANK + 1.0)
    assert all(results)


def test_a_tensor_that_gets_another_dtype_is_reduced_as_that() -> None:
    wrong = []
    for before, after in ((torch.float16, torch.bfloat16), (torch.int32, torch.float32)):
        tensor = torch.full((4,), 1, dtype=before)
        mpips.torch.all_reduce(tensor)
        tensor.data = tensor.data.view(after)
        tensor.fill_(1.5)
        mpips.torch.all_reduce(tensor)
        if not bool((tensor == 1.5 * P).all()):
            wrong.append((before, after))
    assert not wrong


def test_memory_that_a_tensor_gives_up_is_freed() -> None:
    tensor = torch.ones(1 << 20)
    storage = weakref.ref(tensor.untyped_storage())
    mpips.torch.all_reduce(tensor)
    tensor.data = torch.empty(0)
    assert storage() is None


def test_a_rank_outside_of_the_group_is_left_out() -> None:
    group, tensor = dist.new_group([0]), torch.full((3,), RANK + 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mpips.torch.all_reduce(tensor, group=group)
    assert bool((tensor == RANK + 1.0).all())


def test_new_tensors_are_not_taken_for_old_ones():
    wrong = []
    for turn in range(200):
        tensor = torch.full((1 + turn % 3,), RANK + 1.0 + turn)
        mpips.torch.all_reduce(tensor)
        if not bool((tensor == TOTAL + turn * P).all()):
            wrong.append(turn)
    assert not wrong


def test_it_waits_for_operations_that_are_under_way():
    first, second = torch.full((100_000,), RANK + 1.0), torch.full((3,), RANK + 1.0)
    wrong = []
    for turn in range(20):
        first.fill_(RANK + 1.0)
        second.fill_(RANK + 1.0)
        work = dist.all_reduce(first, async_op=True)
        mpips.torch.all_reduce(second)
        work.wait()
        if not bool((first == TOTAL).all() and (second == TOTAL).all()):
            wrong.append(turn)
    assert not wrong


def test_the_work_of_a_call_that_is_over_has_its_result():
    tensor = torch.full((3,), RANK + 1.0)
    options = dist.AllreduceOptions()
    options.asyncOp = False
    work = dist.group.WORLD.allreduce([tensor], options)
    right = [work.wait(), work.is_completed(), work.get_future().value()[0] is tensor, bool((tensor == TOTAL).all())]
    assert all(right)


def test_calls_of_a_second_thread_take_the_general_way():
    tensor, results = torch.full((3,), RANK + 1.0), []

    def call() -> None:
        mpips.torch.all_reduce(tensor)
        results.append(bool((tensor == TOTAL).all()))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert results == [True]


def test_groups_of_some_ranks():
    pairs = [dist.new_group([rank]) for rank in range(P)]
    tensor = torch.full((3,), RANK + 1.0)
    mpips.torch.all_reduce(tensor, group=pairs[RANK])
    assert bool((tensor == RANK + 1.0).all())


def test_compiled_code_has_it_as_an_operator():
    def double(tensor: torch.Tensor) -> torch.Tensor:
        mpips.torch.all_reduce(tensor)
        return tensor * 2

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    results = [bool((compiled(torch.full((3,), RANK + 1.0)) == 2 * TOTAL).all()) for _ in range(3)]
    assert all(results)


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match="give sum, mean, prod, min, max"):
        mpips.torch.all_reduce(torch.ones(3), "add")


@several
def test_ranks_that_bring_unlike_tensors_hear_of_it():
    with pytest.raises(mpips.MismatchError, match="allreduce of 3 float32"):
        mpips.torch.all_reduce(torch.ones(3 + (RANK == P - 1)))
