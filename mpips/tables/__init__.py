"""Tables: rows that servers make when somebody first pushes to them, from `Table` to what is left after a death.

On a worker: `table` (the calls and their checks), `client` (sums repeated ids, spreads them over the servers, sends
requests), `in_place` (reads rows in a server's memory).

On a server: `service` (requests in, answers out), `rounds` (when pushes are applied), `rows`, `index` and `places`
(where the row of an id lies, and which rows are dropped), `initial` (first values), `admission` (which ids get a row),
`row_optimizers` (update rules), `kernels` (compiled loops), `journal` (keeps the round before the last one).

For both: `files` (checkpoints and exports). After a death: `plan` (who has whose rows), `transfer` (moves rows to other
servers), `mirror` (a second copy on another host).
"""
