"""Collectives between nodes: messages of a schedule, two levels, the MPI's own calls."""
