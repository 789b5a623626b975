"""A server: it receives messages from workers, applies what they push to its units, and sends answers.

A unit is a part of a key on one server. The same workers always push to it.

The modules, from the top: `loop` (time and messages, from generation to generation), `requests` (rare requests and
snapshots), `service` (what a server offers besides keys), `state` (the rules for all units, a state machine without
MPI), `quorum` (the rules for a store whose rounds close by a quorum), `late` (long waits), `load` (figures for other
processes), `reduce` (sums and the threads that share them), `sources` (pushes as a server reads them), `unit` (one
unit's values and state).
"""
