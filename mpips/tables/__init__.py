"""Embedding tables: a server makes the row of an id when a worker first pushes to that id.

On a worker: `make` (checks options and makes a table), `table` (the calls and their checks), `worker` (the tables as
the store sees them), `client` (sums repeated ids, spreads them over the servers, sends requests), `in_place` (reads
rows in a server's memory).

On a server: `service` (requests in, answers out), `rounds` (when pushes are applied), `rows`, `index` and `places`
(the position of each id's row, and which rows are dropped), `initial` (first values), `admission` (which ids get a
row), `row_optimizers` (update rules), `halves` (rows of float16 and bfloat16), `kernels` (compiled loops), `journal`
(keeps the previous round for a recovery).

For both: `messages`, and `files` (checkpoints and exports). After a death: `plan` (where each server's rows come from),
`mover` (moves rows to other servers), `mirror` (a second copy on another host). `kind` connects tables to the store.
"""
