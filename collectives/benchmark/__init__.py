"""`mpips bench` times collectives: `case` makes the calls to time, `harness` times them, `report` shows the times."""
