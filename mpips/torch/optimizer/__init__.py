"""DistributedOptimizer: wraps a PyTorch optimizer so that `step` goes through a store."""
