"""DistributedOptimizer: a store in the place of a PyTorch optimizer's `step`."""
