"""Which way each call goes on this machine: the table that decides, and the command that measures it."""
