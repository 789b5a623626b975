"""What the ranks of a node share: memory for arrays, the board on which they meet, failures, the wait loop."""
