"""What can go wrong in a collective, as exceptions.  Every rank of the communicator raises the same sentence."""


class CollectiveError(RuntimeError):
    """A collective cannot be done; the communicator stays usable, unless the sentence says otherwise."""

    of_caller = True  # the sentence tells all: no line of ours is to be shown beside it


class MismatchError(CollectiveError, ValueError):
    """Ranks called with arguments that do not fit together, or one rank's arguments are bad."""


class Withdrawn(MismatchError):
    """This rank came when another had given up, as it had waited too long or was interrupted; the sentence says."""


class StallError(CollectiveError, TimeoutError):
    """A wait exceeded ``timeout_seconds``; the sentence names the operation and the ranks that have not come."""
