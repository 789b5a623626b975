"""Chooses the fastest way for a call on this machine: `table` decides, and the command in `tune` measures the table."""
