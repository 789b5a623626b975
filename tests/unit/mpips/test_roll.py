"""The notes of the workers of a client, here of one."""

from mpi4py import MPI

from mpips import roll


def test_calls_go_on_when_their_numbers_are_used_up():
    notes = roll.Roll(MPI.COMM_SELF)
    notes._calls = roll.MOST_CALLS - 2
    for call in range(4):
        notes.note(f"push of {call}")
        assert notes.agrees()
