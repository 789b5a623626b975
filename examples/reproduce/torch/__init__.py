"""Data-parallel training in PyTorch by who averages the gradients."""
