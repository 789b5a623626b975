"""Measurements of the store: beside MXNet and other tables, while it waits, when it starts, when a rank is killed."""
