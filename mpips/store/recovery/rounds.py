"""At which round keys stand again when a generation has ended. Pure.

A round may have ended for some keys and not for others. Where all can be put back to one, none is lost and none counts
twice: the training loop makes the others again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from mpips.store.keys.key import Name


class Chosen(NamedTuple):
    """The round of each key, and that of all of them together, if there is one."""

    rounds: dict[Name, int]
    step: int | None


def choose(available: Mapping[Name, Collection[int]], synchronous: bool) -> Chosen:
    """From the rounds at which each key can be had whole, one at least, to the one at which it is to stand.

    In a synchronous store all keys stand at one round where they can: the lowest of their newest ones. Keys that were
    never pushed do not hinder that. Else each stands at its own newest.
    """
    newest = {name: max(rounds) for name, rounds in available.items()}
    for names in (list(newest), [name for name, round_ in newest.items() if round_]):
        common = min((newest[name] for name in names), default=0)
        if synchronous and all(common in available[name] for name in names):
            return Chosen(newest | dict.fromkeys(names, common), common)
    return Chosen(newest, None)
