"""What the store runs on: epochs and their failures, rendezvous, waiting, operations in the background."""
