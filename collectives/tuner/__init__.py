"""What `auto` picks: the table of measurements, and the command that measures it."""
