"""Chooses the fastest way to run a call on this machine: `table` has the measurements that the command `tune` makes."""
