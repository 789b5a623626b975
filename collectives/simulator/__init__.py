"""The time of an algorithm on a network: by formula, by clocks of all ranks, by flows on shared links."""
