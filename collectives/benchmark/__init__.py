"""`mpips bench` times collectives: `case` makes the calls, `harness` times calls of any kind, `report` shows times."""
