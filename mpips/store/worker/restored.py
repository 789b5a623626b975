"""Track restored content that the program has not asked for yet: keys, collections, optimizers and compression.

A job that resumes from a checkpoint makes the same calls as a job that starts from scratch. A worker that joins a
running store also makes these calls, and a program may repeat them after a recovery. When such a call asks for restored
content, the store keeps that content, and the program is said to *claim* it:

- `init` keeps the restored values.
- The call that makes a collection keeps its restored content.
- `set_optimizer` keeps the restored optimizer with its hyperparameters and state.
- `set_gradient_compression` keeps the restored residuals.

A call that only claims restored content is local, because other workers may claim it at another time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from mpips.compression.compressors import Compressor
from mpips.compression.registry import options
from mpips.optimizers.base import Optimizer, unlike
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import SHOWN, Key, Name


class Restored:
    """Restored content that the program may still claim, each item once.

    Optimizers and compression can only be claimed before the first push.

    Args:
        source: The name of the checkpoint or store in error messages.
        names: Names of the restored keys and collections.
        groups: The restored optimizers of the keys.
        compressor: The restored compression.
        later: Names that may also be claimed after the first push. None means all names.
        saved: True if an earlier job has saved the content. That job may have trained another model.
        strict: Raise ValueError if the program sets an optimizer of another class.
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
        self.source = source
        self.names = set(names)
        self._compressor = compressor
        self.cure = "give the same, or another folder" if saved else "give the same"
        # True if an earlier job has saved the content, and `init` has not been called yet
        self._unasked = saved
        self._strict = strict
        self._default = None if groups is None else groups.default
        self._own = {} if groups is None else dict(groups.own)
        # keys that may also be claimed after the first push
        self._later = set(self.names if later is None else later)

    def renewed(self, source: str, names: Iterable[Name], groups: Groups, compressor: Compressor | None) -> Restored:
        """Return a `Restored` for the time after a recovery. Until the first push all content may be claimed."""
        all_names = set(names)
        return Restored(source, all_names, groups, compressor, later=all_names & self._later)

    def pushed(self) -> None:
        """Note the first push. Optimizer and compression calls after it are collective, and claim nothing."""
        self.names = self._later
        self._default, self._own, self._compressor = None, {}, None

    def offer(self, names: Iterable[Name], source: str) -> None:
        """Add names of keys and collections restored from `source`. They may also be claimed after the first push."""
        self.source = source
        self.names |= {*names}
        self._later |= {*names}

    def check_key(self, restored: Key, asked: Key) -> None:
        """Raise ValueError if `init` asks for a restored key with another shape or dtype."""
        if (restored.shape, restored.dtype) != (asked.shape, asked.dtype):
            has, wanted = f"{restored.dtype.name}{restored.shape}", f"{asked.dtype.name}{asked.shape}"
            raise ValueError(f"init: key {asked.name!r} is {has} in {self.source} and {wanted} here: {self.cure}")

    def check_first_init(self, asked: Sequence[Name]) -> None:
        """Raise ValueError if the first `init` asks only for keys that the checkpoint does not have."""
        if self._unasked and self.names and asked and not any(name in self.names for name in asked):
            some = ", ".join(map(repr, sorted(self.names, key=str)[:SHOWN]))
            raise ValueError(
                f"init: key {asked[0]!r} is not in {self.source}, which has {some}, so it was saved by another "
                "training: give another folder"
            )

    def claim(self, names: Iterable[Name]) -> None:
        """Remove names that `init` has asked for, or whose keys no longer exist. Nobody can claim them again."""
        self._unasked = False
        self.keep_only((self.names | self._later).difference(names))

    def keep_only(self, names: Collection[Name]) -> None:
        """Remove all names except these."""
        self.names.intersection_update(names)
        self._later.intersection_update(names)

    @property
    def optimizers(self) -> bool:
        """True if an optimizer may still be claimed."""
        return self._default is not None or bool(self._own)

    def unrestored(self, chosen: Optimizer, names: Sequence[Name] | None) -> Sequence[Name] | None:
        """Return those of `names` whose optimizer was not restored, and so has to be set.

        Return [] if all were restored.

        None stands for all keys, both as the argument and as the result.
        """
        if names is None:
            return [] if self._suits(self._default, chosen) else None
        return [name for name in names if not self._suits(self._own.get(name, self._default), chosen)]

    def _suits(self, restored: Optimizer | None, chosen: Optimizer) -> bool:
        if restored is not None and type(restored) is not type(chosen) and self._strict:
            has, given = type(restored).__name__, type(chosen).__name__
            raise ValueError(f"set_optimizer: {self.source} has {has}, and this is {given}: {self.cure}")
        return type(restored) is type(chosen)

    def ignored_numbers(self, chosen: Optimizer, names: Sequence[Name] | None) -> str:
        """Return a warning if hyperparameters of `chosen` differ from the restored ones, else "".

        The store keeps the restored hyperparameters. `names` of None stands for all keys.
        """
        held = [self._default] if names is None else [self._own.get(name, self._default) for name in names]
        differences = [unlike(restored, chosen) for restored in held if self._strict and type(restored) is type(chosen)]
        return next(filter(None, differences), "")

    def claim_optimizers(self, names: Sequence[Name] | None) -> None:
        """Remove optimizers that `set_optimizer` has asked for: those of `names`, or the default optimizer for None."""
        if names is None:
            self._default = None
        for name in names or ():
            self._own.pop(name, None)

    def claim_compressor(self, chosen: Compressor) -> bool:
        """Return True if `chosen` equals the restored compression. Only the first call can claim it."""
        held, self._compressor = self._compressor, None
        return held is not None and options(held) == options(chosen)
