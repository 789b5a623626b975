"""The ground that ranks of one node share: arrays, words by which they meet, one way to wait, the generation's end."""
