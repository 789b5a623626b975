"""What an algorithm would take on a network: topologies, closed forms, clocks of all ranks, flows on shared links."""
