"""Every call of c10d on mpips beside gloo, on the same inputs: results, or that both refuse.

An input is made from the rank, the type and the shape alone, so both backends get the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import mpips.torch  # noqa: F401  (makes the backend known)

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
OTHERS = (torch.bool, torch.complex64)
SHAPES = ((), (1,), (0,), (7,), (3, 5), (0, 4), (1025,))
FINE = ("equal", "refused by both", "more")
"""Verdicts: the third where only mpips can."""
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


class Cell(NamedTuple):
    """One call with one kind of input: `run(group)` gives the tensors to compare."""

    call: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    run: Callable[[Any], list[Tensor]]


def tensor(dtype: torch.dtype, shape: tuple[int, ...], salt: int = 0) -> Tensor:
    """This rank's input; small numbers, so that sums are exact in any type and order."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + salt)
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


def cells() -> Iterator[Cell]:
    """All calls on all types and shapes."""
    for dtype, shape in itertools.product((*FLOATS, *INTEGERS, *OTHERS), SHAPES):
        for name, run in _calls(dtype, shape):
            yield Cell(name, dtype, shape, run)


def _calls(dtype: torch.dtype, shape: tuple[int, ...]) -> Iterator[tuple[str, Callable[[Any], list[Tensor]]]]:
    p, r = dist.get_world_size(), dist.get_rank()
    last = p - 1
    for op in OPS:
        how = getattr(dist.ReduceOp, op)
        yield f"all_reduce {op}", lambda g, how=how: _in_place(dist.all_reduce, tensor(dtype, shape), how, g)
        yield f"reduce {op}", lambda g, how=how: _reduced(tensor(dtype, shape), last, how, g)
        yield f"reduce_scatter {op}", lambda g, how=how: _into(
            tensor(dtype, shape), lambda out: dist.reduce_scatter(out, _parts(dtype, shape), how, g)
        )
    yield "all_reduce, transposed", lambda g: _in_place(dist.all_reduce, _strided(dtype, shape), dist.ReduceOp.SUM, g)
    yield "all_reduce, async", lambda g: _awaited(tensor(dtype, shape), g)
    yield "broadcast", lambda g: _broadcast(tensor(dtype, shape), last, g)
    yield "all_gather", lambda g: _outputs(dtype, shape, lambda outs: dist.all_gather(outs, tensor(dtype, shape), g))
    yield "all_gather_into_tensor", lambda g: _into(
        torch.zeros(p * max(1, _numel(shape)), dtype=dtype),
        lambda out: dist.all_gather_into_tensor(out, torch.ones(max(1, _numel(shape)), dtype=dtype) * r, g),
    )
    yield "reduce_scatter_tensor", lambda g: _into(
        torch.zeros(shape[:1] or (1,), dtype=dtype),
        lambda out: dist.reduce_scatter_tensor(out, tensor(dtype, (p * out.numel(),)), group=g),
    )
    yield "all_to_all_single", lambda g: _into(
        torch.zeros((p * 2, *shape), dtype=dtype),
        lambda out: dist.all_to_all_single(out, tensor(dtype, out.shape), group=g),
    )
    yield "all_to_all_single, uneven", lambda g: _uneven(dtype, g)
    yield "gather", lambda g: _gathered(dtype, shape, last, g)
    yield "scatter", lambda g: _into(
        tensor(dtype, shape),
        lambda out: dist.scatter(out, _parts(dtype, shape) if r == last else None, last, g),
    )
    yield "send, recv", lambda g: _round(dtype, shape, g)
    yield "batch_isend_irecv", lambda g: _batch(dtype, shape, g)
    yield "all_reduce_coalesced", lambda g: _coalesced(dtype, shape, g)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _parts(dtype: torch.dtype, shape: tuple[int, ...]) -> list[Tensor]:
    return [tensor(dtype, shape, salt) for salt in range(1, 1 + dist.get_world_size())]


def _strided(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return tensor(dtype, (*shape, 2, 3)).transpose(-1, -2)


def _in_place(call: Any, x: Tensor, how: Any, group: Any) -> list[Tensor]:
    call(x, how, group)
    return [x]


def _into(out: Tensor, call: Callable[[Tensor], Any]) -> list[Tensor]:
    call(out)
    return [out]


def _reduced(x: Tensor, root: int, how: Any, group: Any) -> list[Tensor]:
    dist.reduce(x, root, how, group)
    return [x] if dist.get_rank() == root else []


def _awaited(x: Tensor, group: Any) -> list[Tensor]:
    y = x + 1
    first = dist.all_reduce(x, group=group, async_op=True)
    second = dist.all_reduce(y, group=group, async_op=True)
    second.wait()
    first.wait()
    return [x, y - x]


def _broadcast(x: Tensor, root: int, group: Any) -> list[Tensor]:
    dist.broadcast(x, root, group)
    return [x]


def _outputs(dtype: torch.dtype, shape: tuple[int, ...], call: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    outs = [torch.zeros(shape, dtype=dtype) for _ in range(dist.get_world_size())]
    call(outs)
    return outs


def _gathered(dtype: torch.dtype, shape: tuple[int, ...], root: int, group: Any) -> list[Tensor]:
    mine = dist.get_rank() == root
    outs = [torch.zeros(shape, dtype=dtype) for _ in range(dist.get_world_size())] if mine else None
    dist.gather(tensor(dtype, shape), outs, root, group)
    return outs or []


def _uneven(dtype: torch.dtype, group: Any) -> list[Tensor]:
    p, r = dist.get_world_size(), dist.get_rank()
    sent, came = [(r + d) % 3 for d in range(p)], [(s + r) % 3 for s in range(p)]
    out = torch.zeros((sum(came), 2), dtype=dtype)
    dist.all_to_all_single(out, tensor(dtype, (sum(sent), 2)), came, sent, group)
    return [out]


def _round(dtype: torch.dtype, shape: tuple[int, ...], group: Any) -> list[Tensor]:
    """From even ranks to the next."""
    p, r = dist.get_world_size(), dist.get_rank()
    out = torch.zeros(shape, dtype=dtype)
    if r % 2 == 0 and r + 1 < p:
        dist.send(tensor(dtype, shape), r + 1, group, tag=5)
    elif r % 2:
        dist.recv(out, r - 1, group, tag=5)
    return [out]


def _batch(dtype: torch.dtype, shape: tuple[int, ...], group: Any) -> list[Tensor]:
    """Around a ring, all at once."""
    p, r = dist.get_world_size(), dist.get_rank()
    out = torch.zeros(shape, dtype=dtype)
    if p == 1:
        return [out]
    operations = [
        dist.P2POp(dist.irecv, out, (r - 1) % p, group),
        dist.P2POp(dist.isend, tensor(dtype, shape), (r + 1) % p, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [out]


def _coalesced(dtype: torch.dtype, shape: tuple[int, ...], group: Any) -> list[Tensor]:
    tensors = [tensor(dtype, shape), tensor(dtype, (4,), 9)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def outcome(cell: Cell, group: Any) -> list[Tensor] | str:
    """What the call gives, or the type of what it raises."""
    try:
        return cell.run(group)
    except Exception as error:
        return type(error).__name__


def verdict(cell: Cell, ours: Any, theirs: Any) -> str:
    """"equal", "refused by both", "more" (only ours can), or what differs."""
    a, b = outcome(cell, ours), outcome(cell, theirs)
    if isinstance(b, str):
        return "refused by both" if isinstance(a, str) else "more"
    if isinstance(a, str):
        return f"raises {a}"
    alike = _nearly if "AVG" in cell.call else torch.equal  # gloo divides complex numbers in another way
    same = len(a) == len(b) and all(x.shape == y.shape and alike(x, y) for x, y in zip(a, b))
    return "equal" if same else "differs"


def _nearly(x: Tensor, y: Tensor) -> bool:
    """Equal but for the last bit."""
    return torch.allclose(x, y, rtol=torch.finfo(x.dtype).eps, atol=0)
