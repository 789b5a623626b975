"""Collectives between nodes: schedules over messages, a form with two levels, and MPI's own collectives."""
