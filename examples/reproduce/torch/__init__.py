"""Measurements of data-parallel training in PyTorch, with mpips and with its rivals."""
