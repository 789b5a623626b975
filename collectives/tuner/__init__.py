"""The choice of a way for each call on this machine: the table that decides, and the command that measures it."""
