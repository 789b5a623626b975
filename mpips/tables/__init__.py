"""Tables: rows that servers make when somebody first pushes to them, from `Table` to what is left after a death.

What a worker holds: `table` (the calls, their checks), `client` (which id goes to which server, messages), `in_place`
(rows read in a server's memory), `merge` (ids named twice). What a server holds: `service` (requests in, answers out),
`rounds` (when pushes count), `rows`, `index` and `places` (where the row of an id lies, and which rows are dropped),
`initial` (first values), `admission` (which ids get a row), `row_optimizers` (how a row is updated), `kernels` (the
same, compiled), `journal` (the round before). `files`: checkpoints and exports. After a death: `plan` (who holds
whose rows), `transfer` (rows go to other servers), `mirror` (a second copy on another host).
"""
