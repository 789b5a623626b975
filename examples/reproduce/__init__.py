"""Reproductions of the papers' figures, and measurements beside rivals. Each has a folder; this one has shared code."""
