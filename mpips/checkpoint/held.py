"""What a store holds before its program has asked for it, as a job goes on from a checkpoint; and how it is claimed.

The program makes the same calls as in a job that begins: `init` of a key that is there keeps what is stored,
`set_optimizer` keeps the optimizer, with the numbers and the state that it had, and `set_gradient_compression` what was
kept back. Each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mpips.compression.base import Compressor
from mpips.compression.registry import options
from mpips.keys.key import SHOWN, Key, Name
from mpips.optimizers.base import Optimizer
from mpips.optimizers.groups import Groups


class Held:
    """What the program has not yet asked for. `source` names where it is from in sentences."""

    def __init__(
        self, source: str = "", names: Iterable[Name] = (), groups: Groups | None = None,
        compressor: Compressor | None = None,
    ) -> None:  # fmt: skip
        self.source, self.names, self._compressor = source, set(names), compressor
        self._claimed = False
        self._default = None if groups is None else groups.default
        self._own = {} if groups is None else dict(groups.own)

    def see(self, here: Key, asked: Key) -> None:
        """ValueError where `init` asks for a key that is held in another shape or dtype."""
        if (here.shape, here.dtype) != (asked.shape, asked.dtype):
            there, wanted = f"{here.dtype.name}{here.shape}", f"{asked.dtype.name}{asked.shape}"
            raise ValueError(
                f"init: key {asked.name!r} is {there} in {self.source} and {wanted} here, so it was saved by another "
                "training: give another folder, or the keys that it was saved with"
            )

    def see_any(self, asked: Sequence[Key]) -> None:
        """ValueError where the first `init` asks for keys of which none is held, though some are."""
        if self.names and not self._claimed and not any(key.name in self.names for key in asked):
            some = ", ".join(map(repr, sorted(self.names, key=str)[:SHOWN]))
            raise ValueError(
                f"init: key {asked[0].name!r} is not in {self.source}, which has {some}, so it was saved by another "
                "training: give another folder"
            )

    def claim(self, keys: Iterable[Key]) -> None:
        """`init` has asked for these, or they are gone."""
        self._claimed = True
        self.names.difference_update(key.name for key in keys)

    def unheld(self, chosen: Optimizer, names: Sequence[Name] | None) -> Sequence[Name] | None:
        """The keys of a `set_optimizer` (None: all) for which it has to be set anew: none, [], where all are held.

        ValueError where a held optimizer is of another class.
        """
        held = [self._default] if names is None else [self._own[name] for name in names if name in self._own]
        for there in held:
            if there is not None and type(there) is not type(chosen):
                raise ValueError(
                    f"set_optimizer: {self.source} was saved with {type(there).__name__}, and this is "
                    f"{type(chosen).__name__}: give the same, or another folder"
                )
        if names is None:
            return None if self._default is None else []
        return [name for name in names if name not in self._own]

    def claim_optimizers(self, names: Sequence[Name] | None) -> None:
        """`set_optimizer` has asked for that of these keys, or for the default."""
        if names is None:
            self._default = None
        for name in names or ():
            self._own.pop(name, None)

    def claims(self, chosen: Compressor) -> bool:
        """Whether this compression is held, with what it has kept back; no longer."""
        held, self._compressor = self._compressor, None
        return held is not None and options(held) == options(chosen)
