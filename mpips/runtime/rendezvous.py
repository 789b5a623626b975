"""The one rendezvous: ranks learn each other's bytes, or see that they ask for the same.

Used by what all workers (or all ranks) call together: create, init, set_optimizer, forget, recut, barrier, save, load.
Each rank sends its bytes to each other rank, so that each knows whom it waits for. A bad argument is brought along as a
`refusal`: all ranks raise one sentence, nothing has changed, and the epoch lives on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from collectives.errors import of_caller

if TYPE_CHECKING:
    from mpips.runtime.epoch import Epoch

Items = Sequence[tuple[Any, str]]


class _Word(msgspec.Struct, array_like=True):
    """What a rank brings: the call, what it calls it with, why it cannot (`refusal`, a TypeError or a ValueError)."""

    what: str
    items: list[tuple[str, str]]
    refusal: str = ""
    type_error: bool = False
    data: bytes = b""


def exchange(epoch: Epoch, payload: bytes, what: str, everybody: bool = False) -> list[bytes]:
    """Each worker's payload, in rank order. Collective over the workers (`everybody`: over all ranks of the store),
    blocking.

    EpochError where the epoch ends meanwhile; StallError, naming the ranks that have not come, after the limit.
    """
    return epoch.meet(payload, what, everybody)


def agree(
    epoch: Epoch,
    what: str,
    items: Items = (),
    refusal: BaseException | None = None,
    noun: str = "key",
    data: bytes = b"",
    everybody: bool = False,
) -> list[bytes]:
    """See that all workers ask for the same; each one's `data`, in rank order. Collective, blocking.

    `items` are (name, what is asked for it), such as (key, "float32(3, 4)"); `noun` says what a name is of. `refusal`
    is what was wrong with this rank's own arguments. Where one refuses, or two differ, all ranks raise the same
    ValueError (TypeError where the only refusals are such), nothing has changed, and the epoch lives on.
    """
    words = [(repr(name), text) for name, text in items]
    mine = _Word(what, words, _text(refusal), isinstance(refusal, TypeError), data)
    said = exchange(epoch, msgspec.msgpack.encode(mine), what, everybody)
    every = [msgspec.msgpack.decode(word, type=_Word) for word in said]
    error = difference(every, noun)
    if error is not None:
        raise of_caller(error)
    return [word.data for word in every]


def attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """What `make` returns, or the ValueError or TypeError that it raises, to be brought along as a `refusal`."""
    try:
        return make(), None
    except (ValueError, TypeError) as error:
        return None, error


def difference(every: Sequence[_Word], noun: str = "key") -> ValueError | TypeError | None:
    """What all ranks raise; None where all ask for the same. Pure."""
    refused = [rank for rank, word in enumerate(every) if word.refusal]
    if refused:
        first = every[refused[0]]
        same = len(refused) == len(every) and len({word.refusal for word in every}) == 1
        sentence = first.refusal if same else f"rank {refused[0]}: {first.refusal}"
        return (TypeError if all(every[rank].type_error for rank in refused) else ValueError)(sentence)
    for rank, word in enumerate(every):
        if sentence := _unlike(every[0], word, rank, noun):
            return ValueError(sentence)
    return None


def _unlike(first: _Word, other: _Word, rank: int, noun: str) -> str:
    if first.what != other.what:
        return f"rank 0 calls {first.what}, rank {rank} calls {other.what}: all make this call together"
    for mine, theirs in zip(first.items, other.items):
        if mine[0] != theirs[0]:
            return f"{first.what}: rank 0 gives {noun} {mine[0]}, rank {rank} {noun} {theirs[0]} in its place"
        if mine[1] != theirs[1]:
            return f"{first.what}: {noun} {mine[0]} is {mine[1]} on rank 0 and {theirs[1]} on rank {rank}"
    if len(first.items) != len(other.items):
        return f"{first.what}: rank 0 gives {len(first.items)} {noun}s, rank {rank} gives {len(other.items)}"
    return ""


def _text(refusal: BaseException | None) -> str:
    return "" if refusal is None else str(refusal) or type(refusal).__name__
