"""A server: frames in, rounds and updates of its units in the middle, frames out.

From the top: `loop` (time, frames, from generation to generation), `requests` (rare things, snapshots), `state` (all
units: a machine without MPI, events in, replies out), `late` (long waits), `reduce` (sums, and the threads that share
them), `sources` (contributions), `unit` (what is stored).
"""
