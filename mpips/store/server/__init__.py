"""A server: messages of workers come in, rounds and updates of its units are made, and answers go out.

From the top: `loop` (time and messages, from generation to generation), `requests` (rare requests and snapshots),
`service` (what is served beside keys), `state` (the rules of all units, a state machine without MPI; with a quorum in
`quorum`), `late` (long waits), `load` (figures for the server's page), `reduce` (sums and the threads that share them),
`sources` (contributions), `unit` (one unit's values and state).
"""
