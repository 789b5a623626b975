"""Keep what a store has restored and its program has not asked for yet: keys, tables, optimizers and compression.

A job that goes on from a checkpoint makes the same calls as one that begins, and so does a worker that has joined a
store which others train; after a recovery a program may repeat them. `init` of a restored key keeps what is stored,
`table` of a restored table its rows, `set_optimizer` keeps the optimizer with its numbers and state, and
`set_gradient_compression` what was kept back. Such a call is local: other workers make it in their own time, or made it
long ago.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mpips.compression.compressors import Compressor
from mpips.compression.registry import options
from mpips.optimizers.base import Optimizer, unlike
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import SHOWN, Key, Name


class Restored:
    """All that the program may claim: each once, optimizers and compression before it pushes anything.

    `source` names the checkpoint or the store in sentences; `names` are those of keys and tables.

    `later`: keys that may be claimed after the first push, too; all where None. `saved`: by another job, and so
    perhaps by another training. `strict`: an optimizer of another class is an error.
    """

    def __init__(
        self,
        source: str = "",
        names: Iterable[Name] = (),
        groups: Groups | None = None,
        compressor: Compressor | None = None,
        *,
        later: Iterable[Name] | None = None,
        saved: bool = False,
        strict: bool = False,
    ) -> None:
        self.source, self.names, self._compressor = source, set(names), compressor
        self.cure = "give the same, or another folder" if saved else "give the same"
        self._unasked, self._strict = saved, strict
        self._default = None if groups is None else groups.default
        self._own = {} if groups is None else dict(groups.own)
        self._later = set(self.names if later is None else later)
        """Keys that may also be claimed after the first push."""

    def renewed(self, source: str, names: Iterable[Name], groups: Groups, compressor: Compressor | None) -> Restored:
        """Return what it may claim after a recovery, until it pushes: everything."""
        there = set(names)
        return Restored(source, there, groups, compressor, later=there & self._later)

    def pushed(self) -> None:
        """The program has pushed: all other calls are made together from now on."""
        self.names = self._later
        self._default, self._own, self._compressor = None, {}, None

    def offer(self, names: Iterable[Name]) -> None:
        """These have been restored, too."""
        self.names |= {*names}
        self._later |= {*names}

    def check_key(self, here: Key, asked: Key) -> None:
        """ValueError where `init` asks for a key that is held in another shape or dtype."""
        if (here.shape, here.dtype) != (asked.shape, asked.dtype):
            there, wanted = f"{here.dtype.name}{here.shape}", f"{asked.dtype.name}{asked.shape}"
            raise ValueError(f"init: key {asked.name!r} is {there} in {self.source} and {wanted} here: {self.cure}")

    def check_first_init(self, asked: Sequence[Name]) -> None:
        """ValueError where the first `init` asks for keys of which none was saved, though some were."""
        if self._unasked and self.names and asked and not any(name in self.names for name in asked):
            some = ", ".join(map(repr, sorted(self.names, key=str)[:SHOWN]))
            raise ValueError(
                f"init: key {asked[0]!r} is not in {self.source}, which has {some}, so it was saved by another "
                "training: give another folder"
            )

    def claim(self, names: Iterable[Name]) -> None:
        """`init` has asked for these, or they are gone."""
        self._unasked = False
        self.keep_only((self.names | self._later).difference(names))

    def keep_only(self, names: Collection[Name]) -> None:
        """Only these keys are left."""
        self.names.intersection_update(names)
        self._later.intersection_update(names)

    @property
    def optimizers(self) -> bool:
        """Return whether there is one to be claimed."""
        return self._default is not None or bool(self._own)

    def unrestored(self, chosen: Optimizer, names: Sequence[Name] | None) -> Sequence[Name] | None:
        """Return the keys of a `set_optimizer` (None: all) for which it has to be set anew: none, [], where all are
        held."""
        if names is None:
            return [] if self._suits(self._default, chosen) else None
        return [name for name in names if not self._suits(self._own.get(name, self._default), chosen)]

    def _suits(self, there: Optimizer | None, chosen: Optimizer) -> bool:
        if there is not None and type(there) is not type(chosen) and self._strict:
            has, given = type(there).__name__, type(chosen).__name__
            raise ValueError(f"set_optimizer: {self.source} has {has}, and this is {given}: {self.cure}")
        return type(there) is type(chosen)

    def ignored_numbers(self, chosen: Optimizer, names: Sequence[Name] | None) -> str:
        """Return what an earlier job's checkpoint holds and `set_optimizer` of these keys (None: all) leaves alone."""
        held = [self._default] if names is None else [self._own.get(name, self._default) for name in names]
        told = [unlike(there, chosen) for there in held if self._strict and type(there) is type(chosen)]
        return next(filter(None, told), "")

    def claim_optimizers(self, names: Sequence[Name] | None) -> None:
        """`set_optimizer` has asked for that of these keys, or for the default."""
        if names is None:
            self._default = None
        for name in names or ():
            self._own.pop(name, None)

    def claim_compressor(self, chosen: Compressor) -> bool:
        """Return whether this compression is held, with what it has kept back; no longer."""
        held, self._compressor = self._compressor, None
        return held is not None and options(held) == options(chosen)
