"""Every call of c10d on mpips beside gloo, on the same inputs: results, or that both refuse.

An input is made from the rank, the type and the shape alone, so both backends get the same. Cells are made for a group
by its ranks: `ranks` everywhere below, in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

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


def cells(ranks: Sequence[int], dtypes: Sequence[torch.dtype] = (*FLOATS, *INTEGERS, *OTHERS)) -> Iterator[Cell]:
    """All calls on all types and shapes."""
    for dtype, shape in itertools.product(dtypes, SHAPES):
        for name, run in itertools.chain(_calls(dtype, shape, ranks), _coalesced_calls(dtype, shape, ranks)):
            yield Cell(name, dtype, shape, run)


Calls = Iterator[tuple[str, Callable[[Any], list[Tensor]]]]


def _calls(dtype: torch.dtype, shape: tuple[int, ...], ranks: Sequence[int]) -> Calls:
    p, r, last = len(ranks), ranks.index(dist.get_rank()), ranks[-1]
    for op in OPS:
        how = getattr(dist.ReduceOp, op)
        yield f"all_reduce {op}", lambda g, how=how: _in_place(dist.all_reduce, tensor(dtype, shape), how, g)
        yield f"reduce {op}", lambda g, how=how: _reduced(tensor(dtype, shape), last, how, g)
        yield (
            f"reduce_scatter {op}",
            lambda g, how=how: _into(
                tensor(dtype, shape), lambda out: dist.reduce_scatter(out, _parts(dtype, shape, ranks), how, g)
            ),
        )
    yield "all_reduce, transposed", lambda g: _in_place(dist.all_reduce, _strided(dtype, shape), dist.ReduceOp.SUM, g)
    yield "all_reduce, async", lambda g: _awaited(tensor(dtype, shape), g)
    yield "broadcast", lambda g: _broadcast(tensor(dtype, shape), last, g)
    yield (
        "all_gather",
        lambda g: _outputs(dtype, shape, ranks, lambda outs: dist.all_gather(outs, tensor(dtype, shape), g)),
    )
    yield (
        "all_gather_into_tensor",
        lambda g: _into(
            torch.zeros(p * max(1, _numel(shape)), dtype=dtype),
            lambda out: dist.all_gather_into_tensor(out, torch.ones(max(1, _numel(shape)), dtype=dtype) * r, g),
        ),
    )
    yield (
        "reduce_scatter_tensor",
        lambda g: _into(
            torch.zeros(shape[:1] or (1,), dtype=dtype),
            lambda out: dist.reduce_scatter_tensor(out, tensor(dtype, (p * out.numel(),)), group=g),
        ),
    )
    yield (
        "all_to_all_single",
        lambda g: _into(
            torch.zeros((p * 2, *shape), dtype=dtype),
            lambda out: dist.all_to_all_single(out, tensor(dtype, out.shape), group=g),
        ),
    )
    yield "all_to_all_single, uneven", lambda g: _uneven(dtype, ranks, g)
    yield "gather", lambda g: _gathered(dtype, shape, ranks, g)
    yield (
        "scatter",
        lambda g: _into(
            tensor(dtype, shape),
            lambda out: dist.scatter(out, _parts(dtype, shape, ranks) if r == p - 1 else None, last, g),
        ),
    )
    yield "send, recv", lambda g: _round(dtype, shape, ranks, g)
    yield "batch_isend_irecv", lambda g: _batch(dtype, shape, ranks, g)
    if dtype not in OTHERS and shape:
        for op in ("SUM", "AVG"):
            how = getattr(dist.ReduceOp, op)
            yield f"all_reduce {op}, sparse", lambda g, how=how: _sparse(dtype, shape, how, g)


def _coalesced_calls(dtype: torch.dtype, shape: tuple[int, ...], ranks: Sequence[int]) -> Calls:
    """Forms in which several tensors travel at once: c10d's old ones, its manager's, and functional collectives."""
    p = len(ranks)
    given = lambda: [tensor(dtype, shape or (1,)), tensor(dtype, (4,), 9)]  # noqa: E731
    whole = lambda: [tensor(dtype, (p * x.shape[0], *x.shape[1:])) for x in given()]  # noqa: E731
    wide = lambda: [torch.zeros_like(x) for x in whole()]  # noqa: E731
    yield "all_reduce_coalesced", lambda g: _together(given(), lambda xs: dist.all_reduce_coalesced(xs, group=g))
    yield (
        "all_gather_coalesced",
        lambda g: _by_rank(
            [[torch.zeros_like(x) for x in given()] for _ in ranks],
            lambda outs: dist.all_gather_coalesced(outs, given(), g),
        ),
    )
    for beside in (False, True):
        suffix = ", async" if beside else ""
        yield (
            f"manager of all_reduce{suffix}",
            lambda g, beside=beside: _managed(
                given(), given(), beside, g, lambda out, x: dist.all_reduce(out, group=g)
            ),
        )
        yield (
            f"manager of all_gather_into_tensor{suffix}",
            lambda g, beside=beside: _managed(
                wide(), given(), beside, g, lambda out, x: dist.all_gather_into_tensor(out, x, g)
            ),
        )
        yield (
            f"manager of reduce_scatter_tensor{suffix}",
            lambda g, beside=beside: _managed(
                given(), whole(), beside, g, lambda out, x: dist.reduce_scatter_tensor(out, x, group=g)
            ),
        )
    yield (
        "functional all_gather_into_tensor_coalesced",
        lambda g: [x.clone() for x in functional.all_gather_into_tensor_coalesced(given(), g)],
    )
    yield (
        "functional reduce_scatter_tensor_coalesced",
        lambda g: [x.clone() for x in functional.reduce_scatter_tensor_coalesced(whole(), "sum", [0, 0], g)],
    )


def wrong_calls(group: Any) -> dict[str, Callable[[], Any]]:
    """Calls that gloo refuses by RuntimeError before it sends anything; the root's are refused on the root alone."""
    p, root, zeros = dist.get_world_size(group), dist.get_rank() == 0, torch.zeros
    ops, many, long = dist.ReduceOp, lambda size: [zeros(size) for _ in range(p)], torch.int64

    def refuse() -> None:
        raise RuntimeError

    def on_root(call: Callable[[], Any]) -> Callable[[], Any]:
        return call if root else refuse

    return {
        "all_to_all_single, rows": lambda: dist.all_to_all_single(zeros(p + 1), zeros(p + 2), group=group),
        "all_to_all_single, splits": lambda: dist.all_to_all_single(zeros(p), zeros(p), [2] * p, [2] * p, group),
        "all_to_all_single, sizes": lambda: dist.all_to_all_single(zeros(2 * p), zeros(p), group=group),
        "all_to_all, count": lambda: dist.all_to_all([zeros(1)] * (p + 1), [zeros(1)] * (p + 1), group),
        "all_to_all, none": lambda: dist.all_to_all([], [], group),
        "all_gather, count": lambda: dist.all_gather(many(2)[1:], zeros(2), group),
        "all_gather, sizes": lambda: dist.all_gather(many(3), zeros(2), group),
        "all_gather, sparse": lambda: dist.all_gather(many(2), torch.ones(2).to_sparse(), group),
        "all_gather_into_tensor, sizes": lambda: dist.all_gather_into_tensor(zeros(2 * p + 1), zeros(2), group),
        "all_gather_into_tensor, types": lambda: dist.all_gather_into_tensor(zeros(p, dtype=long), zeros(1), group),
        "reduce_scatter, count": lambda: dist.reduce_scatter(zeros(2), [*many(2), zeros(2)], group=group),
        "reduce_scatter, sizes": lambda: dist.reduce_scatter(zeros(3), many(2), group=group),
        "reduce_scatter_tensor, sizes": lambda: dist.reduce_scatter_tensor(zeros(2), zeros(2 * p + 1), group=group),
        "reduce_scatter_tensor, types": lambda: dist.reduce_scatter_tensor(
            zeros(2, dtype=long), zeros(2 * p), group=group
        ),
        "all_reduce, bool": lambda: dist.all_reduce(zeros(2, dtype=torch.bool), ops.AVG, group),
        "all_reduce, bits": lambda: dist.all_reduce(zeros(2), ops.BAND, group),
        "all_reduce, sparse": lambda: dist.all_reduce(torch.ones(2).to_sparse(), ops.MAX, group),
        "all_reduce, float8": lambda: dist.all_reduce(zeros(2).to(torch.float8_e4m3fn), group=group),
        "reduce, bits": lambda: dist.reduce(zeros(2), 0, ops.BOR, group),
        "broadcast, src": lambda: dist.broadcast(zeros(2), group=group, group_src=p + 3),
        "reduce, dst": lambda: dist.reduce(zeros(2), group=group, group_dst=p + 3),
        "gather, count": on_root(lambda: dist.gather(zeros(2), [*many(2), zeros(2)], 0, group)),
        "gather, sizes": on_root(lambda: dist.gather(zeros(2), many(3), 0, group)),
        "scatter, count": on_root(lambda: dist.scatter(zeros(2), [*many(2), zeros(2)], 0, group)),
        "scatter, sizes": on_root(lambda: dist.scatter(zeros(2), many(3), 0, group)),
        "send, sparse": lambda: dist.send(torch.ones(2).to_sparse(), group=group, group_dst=_next(group)),
        "send, tag": lambda: dist.send(zeros(2), group=group, group_dst=_next(group), tag=-1),
    }


def _next(group: Any) -> int:
    return (dist.get_rank(group) + 1) % dist.get_world_size(group)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _parts(dtype: torch.dtype, shape: tuple[int, ...], ranks: Sequence[int]) -> list[Tensor]:
    return [tensor(dtype, shape, salt) for salt in range(1, 1 + len(ranks))]


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


def _outputs(
    dtype: torch.dtype, shape: tuple[int, ...], ranks: Sequence[int], call: Callable[[list[Tensor]], Any]
) -> list[Tensor]:
    outs = [torch.zeros(shape, dtype=dtype) for _ in ranks]
    call(outs)
    return outs


def _gathered(dtype: torch.dtype, shape: tuple[int, ...], ranks: Sequence[int], group: Any) -> list[Tensor]:
    outs = [torch.zeros(shape, dtype=dtype) for _ in ranks] if dist.get_rank() == ranks[-1] else None
    dist.gather(tensor(dtype, shape), outs, ranks[-1], group)
    return outs or []


def _uneven(dtype: torch.dtype, ranks: Sequence[int], group: Any) -> list[Tensor]:
    p, r = len(ranks), ranks.index(dist.get_rank())
    sent, came = [(r + d) % 3 for d in range(p)], [(s + r) % 3 for s in range(p)]
    out = torch.zeros((sum(came), 2), dtype=dtype)
    dist.all_to_all_single(out, tensor(dtype, (sum(sent), 2)), came, sent, group)
    return [out]


def _round(dtype: torch.dtype, shape: tuple[int, ...], ranks: Sequence[int], group: Any) -> list[Tensor]:
    """From even ranks to the next."""
    p, r = len(ranks), ranks.index(dist.get_rank())
    out = torch.zeros(shape, dtype=dtype)
    if r % 2 == 0 and r + 1 < p:
        dist.send(tensor(dtype, shape), ranks[r + 1], group, tag=5)
    elif r % 2:
        dist.recv(out, ranks[r - 1], group, tag=5)
    return [out]


def _batch(dtype: torch.dtype, shape: tuple[int, ...], ranks: Sequence[int], group: Any) -> list[Tensor]:
    """Around a ring, all at once."""
    p, r = len(ranks), ranks.index(dist.get_rank())
    out = torch.zeros(shape, dtype=dtype)
    if p == 1:
        return [out]
    operations = [
        dist.P2POp(dist.irecv, out, ranks[(r - 1) % p], group),
        dist.P2POp(dist.isend, tensor(dtype, shape), ranks[(r + 1) % p], group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [out]


def _sparse(dtype: torch.dtype, shape: tuple[int, ...], how: Any, group: Any) -> list[Tensor]:
    """Every rank has other entries; rank 0 has none."""
    x = tensor(dtype, shape) * bool(dist.get_rank())
    x = x.to_sparse()
    dist.all_reduce(x, how, group)
    x = x.coalesce()
    return [x.indices(), x.values()]


def _together(tensors: list[Tensor], call: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    call(tensors)
    return tensors


def _by_rank(outs: list[list[Tensor]], call: Callable[[list[list[Tensor]]], Any]) -> list[Tensor]:
    call(outs)
    return [x for out in outs for x in out]


def _managed(
    outs: list[Tensor], given: list[Tensor], beside: bool, group: Any, call: Callable[[Tensor, Tensor], Any]
) -> list[Tensor]:
    """Call for each pair, all in one operation."""
    with dist._coalescing_manager(group, async_ops=beside) as works:
        for out, x in zip(outs, given, strict=True):
            call(out, x)
    if beside:
        works.wait()
    return outs


def outcome(cell: Cell, group: Any) -> list[Tensor] | Exception:
    """What the call gives, or what it raises."""
    try:
        return cell.run(group)
    except Exception as error:
        return error


def verdict(cell: Cell, ours: Any, theirs: Any) -> str:
    """ "equal", "refused by both", "more" (only ours can), or what differs."""
    a, b = outcome(cell, ours), outcome(cell, theirs)
    if isinstance(a, Exception):
        alike = isinstance(b, Exception) and isinstance(a, RuntimeError) >= isinstance(b, RuntimeError)
        return "refused by both" if alike else f"raises {type(a).__name__}"
    if isinstance(b, Exception):
        return "more"
    equal = _nearly if "AVG" in cell.call else torch.equal  # gloo divides complex numbers in another way
    same = len(a) == len(b) and all(x.shape == y.shape and equal(x, y) for x, y in zip(a, b))
    return "equal" if same else "differs"


def _nearly(x: Tensor, y: Tensor) -> bool:
    """Equal but for the last bit."""
    return torch.allclose(x, y, rtol=torch.finfo(x.dtype).eps, atol=0)
