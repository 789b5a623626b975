"""Overlap of communication and compute: profiles, timelines and strategies. Pure: nothing here imports MPI."""
