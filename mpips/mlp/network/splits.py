"""Which rank of a mesh holds which rows and columns of each layer: by its model index, rank % model (`mesh`).

- ``columns``: a rank holds some outputs of the layer (rows of its matrix). The inputs must be whole; the outputs
  are gathered, and the gradient of the inputs is summed over the ranks (the paper's Algorithm 2).
- ``rows``: a rank holds some inputs, exactly the outputs that it computed in the layer before, which must be cut
  by columns and is then not gathered. The outputs are summed over the ranks; backward nothing moves.
- ``whole``: every rank holds and computes the whole layer; nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpips.mlp.intervals import interval

MODES = ("pairs", "columns")
_FEWEST_OUTPUTS_PER_RANK = 8  # below this a gather's latency costs more than computing a last layer on every rank


class Split(NamedTuple):
    """One rank's part of a layer: its kind and the intervals of outputs and inputs whose weights it holds."""

    kind: str
    outputs: tuple[int, int]
    inputs: tuple[int, int]
    gathered: bool  # columns only: whether the next layer needs the outputs of all ranks


def kinds(sizes: Sequence[int], parts: int, mode: str = "pairs") -> list[str]:
    """The kind of every layer: the paper's ("columns"), or pairs of columns and rows, which need one allreduce a
    pair."""
    layers = len(sizes) - 1
    if mode not in MODES:
        raise ValueError(f"split mode {mode!r} is unknown; choose one of {', '.join(MODES)}")
    if parts == 1:
        return ["whole"] * layers
    if mode == "columns":
        return ["columns"] * layers
    chosen = ["columns" if layer % 2 == 0 else "rows" for layer in range(layers)]
    if layers % 2 and sizes[-1] < parts * _FEWEST_OUTPUTS_PER_RANK:
        chosen[-1] = "whole"
    return chosen


def splits(sizes: Sequence[int], parts: int, part: int, mode: str = "pairs") -> list[Split]:
    """What rank `part` of `parts` holds of each layer of a network with these sizes (inputs first, outputs last)."""
    chosen = kinds(sizes, parts, mode)
    result = []
    for layer, kind in enumerate(chosen):
        rows, columns = sizes[layer + 1], sizes[layer]
        outputs = interval(rows, parts, part) if kind == "columns" else (0, rows)
        inputs = interval(columns, parts, part) if kind == "rows" else (0, columns)
        followed = layer + 1 < len(chosen) and chosen[layer + 1] == "rows"
        result.append(Split(kind, outputs, inputs, gathered=kind == "columns" and not followed))
    return result
