"""Collectives between nodes: by our own schedules of messages, with one or two levels, or by MPI's collectives."""
