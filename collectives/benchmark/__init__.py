"""`mpips bench`, which times collectives: `case` makes the calls, `harness` times them, `report` shows the times."""
