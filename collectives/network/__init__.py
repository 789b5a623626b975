"""Collectives between nodes: schedules over messages, in one or two levels, and MPI's own collectives."""
