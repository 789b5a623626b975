"""Starts processes, maps ranks to hosts, emulates clusters. Knows options, hosts, schedulers; nothing of keys."""
