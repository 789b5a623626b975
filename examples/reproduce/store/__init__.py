"""The store beside MXNet, and what it costs while it waits."""
