"""Tables: rows made on demand, kept in memory, and updated row by row. Pure: no MPI, no messages.

`initial`: first values and places of rows, from their ids alone. `rows`: rows of one table on one server. `index`
and `places`: where the row of an id lies, and which rows are dropped. `journal`: the round before.
`row_optimizers`: how a row is updated.
"""
