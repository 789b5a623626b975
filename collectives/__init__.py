"""Collectives over arrays: one schedule proved, costed, and executed over messages and over node-shared memory."""

from collectives.arena import empty
from collectives.errors import CollectiveError, MismatchError, StallError

__all__ = ["empty", "CollectiveError", "MismatchError", "StallError"]
