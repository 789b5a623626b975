"""The data of a training: where rows come from, how they reach the ranks, and which rows a rank holds."""
