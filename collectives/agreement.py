"""Error messages about ranks that must make the same call with the same values, but do not. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpips.collectives.errors import format_ranks

# What a rank passes to a call: pairs (name, description), such as ("key 'w'", "float32(3, 4)"). Names are unique.
Items = Sequence[tuple[str, str]]
# the last part of an error message: what the user should do
SAME_CALL = "let all ranks make the same call"
SAME_VALUES = "give all ranks the same"


def describe_calls(calls: Mapping[int, str]) -> str:
    """Describe which ranks make which call, as an error message.

    Args:
        calls: rank -> the beginning of its call's text. The whole texts differ, but their beginnings may be equal.

    Example:
        >>> describe_calls({0: "push of key 'w'", 1: "pull of key 'w'", 2: "push of key 'w'"})
        "ranks 0, 2 call push of key 'w'; rank 1 calls pull of key 'w': let all ranks make the same call"
    """
    callers: dict[str, list[int]] = {}
    for rank in sorted(calls):
        callers.setdefault(calls[rank], []).append(rank)
    parts = [f"{format_ranks(numbers)} call{'s' * (len(numbers) == 1)} {call}" for call, numbers in callers.items()]
    further = " (the calls differ further on)" * (len(parts) == 1)
    return f"{'; '.join(parts)}{further}: {SAME_CALL}"


def difference(every: Mapping[int, Items]) -> str:
    """Describe the first difference between the lowest rank and another rank, or return "" if the ranks do not differ.

    The caller puts the name of the operation before the description, and advice to the user after it.

    Args:
        every: rank -> the items that the rank passes to the call.

    Example:
        >>> difference({0: [("option servers", "1")], 1: [("option servers", "2")]})
        'option servers is 1 on rank 0 and 2 on rank 1'
    """
    first = min(every, default=0)
    known = dict(every.get(first, ()))
    for rank in sorted(every):
        theirs = dict(every[rank])
        for thing in known:
            if thing in theirs and known[thing] != theirs[thing]:
                return f"{thing} is {known[thing]} on rank {first} and {theirs[thing]} on rank {rank}"
        mine_only = [thing for thing in known if thing not in theirs]
        theirs_only = [thing for thing in theirs if thing not in known]
        if mine_only and theirs_only:
            return f"rank {first} has {mine_only[0]} where rank {rank} has {theirs_only[0]}"
        for thing in mine_only:
            return f"{thing} is {known[thing]} on rank {first} and missing on rank {rank}"
        for thing in theirs_only:
            return f"{thing} is missing on rank {first} and {theirs[thing]} on rank {rank}"
        for thing, instead in zip(known, theirs):
            if thing != instead:
                return f"rank {first} has {thing} where rank {rank} has {instead}"
    return ""
