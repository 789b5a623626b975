"""DistributedOptimizer: wraps a PyTorch optimizer so that its `step` exchanges gradients through a store."""
