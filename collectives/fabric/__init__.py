"""What ranks of one node share: arrays, words by which they meet, one way to wait, the end of a generation."""
