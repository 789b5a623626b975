"""A server: frames in, rounds and updates of its units in the middle, frames out.

From the bottom: `unit` (what is stored), `sources` (contributions), `team` and `reduce` (sums), `reads` (who may read),
`rounds` (synchronous) and `updates` (asynchronous), `late` (long waits), `state` (all units), `snapshot` and `requests`
(rare things), `loop` (frames and time). Everything below `requests` is a machine without MPI: events in, replies out.
"""
