"""Training data: the sources of rows, how rows reach the ranks, and which rows a rank holds."""
