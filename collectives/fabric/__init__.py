"""What ranks of a node share: memory for arrays, words by which they meet, the wait loop, the generation's end."""
