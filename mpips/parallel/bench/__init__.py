"""Benchmarks of parallel training, beside PyTorch's."""
