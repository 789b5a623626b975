"""A server: frames in, rounds and updates of its units in the middle, frames out.

From the bottom: `unit` (what is stored), `sources` (contributions), `reduce` (sums), `reads` (who may read), `rounds`
(synchronous) and `updates` (asynchronous), `late` (long waits), `state` (all units), `snapshot` and `requests` (rare
things), `traffic` (frames), `loop` (time, and from generation to generation). Up to `state` all is a machine without
MPI: events in, replies out.
"""
