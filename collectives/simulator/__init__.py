"""What an algorithm takes on a network: by formula (`cost`), by clocks of all ranks, by flows on shared links."""
