"""A PyTorch module that pools rows of several tables, `EmbeddingBagCollection`, by one pull for all tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpips.collectives.errors import of_caller
from mpips.tables.table import Table, check_one_store, pull_rows
from mpips.torch.embedding import MODES, Embedding, check_ids
from mpips.torch.tensors import from_array, uncompiled


@uncompiled("_pull")
class EmbeddingBagCollection(nn.Module):
    """Computes sums or means of bags of rows for several features. A forward pass is one pull of all their tables.

    It takes the place of an `EmbeddingBag` for each feature, and gives the same results. Each server then gets one
    message in a forward pass, instead of one for each table. Everything else works as in `Embedding`.

    Args:
        tables: For each feature its table, by the name of the feature. Features may share a table. All tables belong to
            one store. The dict must be the same on all workers.
        mode: "sum" or "mean", for all features, or a dict with the mode of each.
        include_last_offset: If True, the last of each feature's `offsets` is the end of the last bag, not the start of
            another bag.

    Raises:
        TypeError, ValueError: An argument is invalid. The forward pass raises these errors for invalid ids.
        RuntimeError: In a backward pass, if no `TableOptimizer` would push the gradient.

    Example:
        >>> users, items = kv.table("viewers", dim=2), kv.table("films", dim=2)
        >>> bags = mpips.torch.EmbeddingBagCollection({"user": users, "seen": items, "liked": items}, mode="sum")
        >>> one, several = torch.tensor([[7], [8]]), torch.tensor([3, 5, 3])
        >>> lengths = {"seen": torch.tensor([2, 1]), "liked": torch.tensor([0, 3])}
        >>> pooled = bags({"user": one, "seen": several, "liked": several}, lengths=lengths)
        >>> torch.cat([*pooled.values()], dim=1).shape  # two bags of each of three features
        torch.Size([2, 6])
    """

    def __init__(
        self, tables: Mapping[str, Table], mode: str | Mapping[str, str] = "mean", include_last_offset: bool = False
    ) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(tables, Mapping) or not tables:
            raise of_caller(TypeError(f"{name}({tables!r}): give a dict of features and their tables"))
        check_one_store(name, tables.values())
        self.modes = dict(mode) if isinstance(mode, Mapping) else dict.fromkeys(tables, mode)
        self._check_features("mode", self.modes, tables)
        if wrong := next((feature for feature in tables if self.modes[feature] not in MODES), None):
            sentence = (
                f"{name}: mode of feature {wrong!r} is {self.modes[wrong]!r}: give {' or '.join(map(repr, MODES))}"
            )
            raise of_caller(ValueError(sentence))
        self.include_last_offset = include_last_offset
        # table -> its features
        self._features: dict[Table, list[str]] = {}
        for feature, table in tables.items():
            self._features.setdefault(table, []).append(feature)
        # the rows of each table, in the order of `_features`
        self.rows = nn.ModuleList(map(Embedding, self._features))

    def forward(
        self,
        ids: Mapping[str, Tensor],
        offsets: Mapping[str, Tensor] | None = None,
        lengths: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return for each feature a row for each bag, (bags, dim), in the order of the features of the collection.

        Args:
            ids: For each feature int64 ids on the host. With 2-D ids, each row of ids is a bag. 1-D ids contain the
                bags one after another, and need offsets or lengths.
            offsets: For features with 1-D ids, the positions at which bags begin.
            lengths: For features with 1-D ids, the number of ids in each bag, in place of offsets.
        """
        self._check_features("ids", ids, self.modes)
        self._check_known("offsets", offsets)
        self._check_known("lengths", lengths)
        begins = {feature: self._offsets_of(feature, ids[feature], offsets, lengths) for feature in self.modes}
        places, rows = self._pull(ids)
        return {
            feature: functional.embedding_bag(
                places[feature].reshape(-1),
                rows[feature],
                offset,
                mode=self.modes[feature],
                include_last_offset=has_end,
            )
            for feature, (offset, has_end) in begins.items()
        }

    def prefetch(self, ids: Mapping[str, Tensor]) -> None:
        """Pull the rows of the next batch during the current one, as `Embedding.prefetch` does. Does not block.

        Each table has a pull of its own, because the tables become ready at different times.

        Args:
            ids: As in a forward pass.
        """
        self._check_features("ids", ids, self.modes)
        for rows, features in zip(self.rows, self._features.values()):
            rows.prefetch(torch.cat([self._flat(feature, ids) for feature in features]))

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the rows of all tables (False), or train them again (True), from the next forward pass on."""
        for rows in self.rows:
            rows.requires_grad_(requires_grad)
        return self

    def extra_repr(self) -> str:
        of = {feature: table.name for table, features in self._features.items() for feature in features}
        return ", ".join(f"{feature}: {mode} of {of[feature]!r}" for feature, mode in self.modes.items())

    def _pull(self, ids: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Pull the rows of all features at once.

        Returns:
            Two dicts by feature: the index of the row for each id, in the shape of the ids; and the rows of its table.
        """
        found = []
        for rows_of, features in zip(self.rows, self._features.values()):
            flat = [self._flat(feature, ids) for feature in features]
            wanted, places, handle = rows_of.find_prefetched(torch.cat(flat))
            found.append((rows_of, features, wanted, places.split([len(part) for part in flat]), handle))
        pulled = pull_rows({rows_of.table: wanted.numpy() for rows_of, _, wanted, _, handle in found if handle is None})
        places_of, rows = {}, {}
        for rows_of, features, wanted, places, handle in found:
            array = pulled[rows_of.table] if handle is None else handle.wait()
            leaf = rows_of.follow_gradient(wanted, from_array(array))
            for feature, part in zip(features, places):
                places_of[feature], rows[feature] = part.view(ids[feature].shape), leaf
        return places_of, rows

    def _flat(self, feature: str, ids: Mapping[str, Tensor]) -> Tensor:
        check_ids(f"{type(self).__name__}: feature {feature!r}", ids[feature])
        return ids[feature].reshape(-1)

    def _offsets_of(
        self, feature: str, ids: Tensor, offsets: Mapping[str, Tensor] | None, lengths: Mapping[str, Tensor] | None
    ) -> tuple[Tensor, bool]:
        """Return the offsets of a feature's bags, and True if the last offset is the end of the last bag."""
        what = f"{type(self).__name__}: feature {feature!r}"
        check_ids(what, ids)
        given, counts = (offsets or {}).get(feature), (lengths or {}).get(feature)
        if given is not None and counts is not None:
            raise of_caller(ValueError(f"{what} has offsets and lengths: give one of them"))
        if ids.dim() == 1 and given is None and counts is None:
            raise of_caller(ValueError(f"{what} has 1-D ids: give their offsets or lengths"))
        if ids.dim() == 2 and given is None and counts is None:
            # PyTorch refuses 2-D ids whose rows are empty, so give it these empty bags by their offsets.
            return torch.arange(len(ids)) * ids.shape[1], False
        if counts is None:
            assert given is not None
            return given, self.include_last_offset
        if not isinstance(counts, Tensor) or counts.is_floating_point() or counts.dtype == torch.bool:
            kind = counts.dtype if isinstance(counts, Tensor) else type(counts).__name__
            raise of_caller(TypeError(f"{what} has lengths of type {kind}: give a tensor of whole numbers"))
        # PyTorch would silently add the remaining ids to the last bag.
        if ids.dim() != 1 or counts.dim() != 1 or int(counts.sum()) != len(ids) or bool((counts < 0).any()):
            sentence = (
                f"{what}: lengths of shape {tuple(counts.shape)} with the sum {int(counts.sum())} do not fit ids of "
                f"shape {tuple(ids.shape)}: give 1-D ids, and the number of ids in each bag"
            )
            raise of_caller(ValueError(sentence))
        counts = counts.long()
        return counts.cumsum(0) - counts, False

    def _check_known(self, what: str, given: object) -> None:
        """Raise TypeError or ValueError unless `given` is None or a dict whose names are features."""
        if isinstance(given, Mapping):
            given = {**dict.fromkeys(self.modes), **given}
        if given is not None:
            self._check_features(what, given, self.modes)

    def _check_features(self, what: str, given: object, features: Mapping[str, object]) -> None:
        """Raise TypeError or ValueError unless `given` is a dict with these features."""
        name = type(self).__name__
        if not isinstance(given, Mapping):
            raise of_caller(TypeError(f"{name}: {what} is a {type(given).__name__}: give a dict with each feature"))
        if given.keys() != features.keys():
            sentence = f"{name}: {what} names the features {[*given]}, and the collection has {[*features]}"
            raise of_caller(ValueError(f"{sentence}: give each of them"))
