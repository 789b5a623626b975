"""`mpips bench`: times collectives. `case` has what is timed, `harness` times it, `report` shows the results."""
