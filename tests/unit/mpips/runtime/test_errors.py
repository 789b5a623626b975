"""Errors of a store, and what is done in spite of errors and interrupts."""

from __future__ import annotations

import signal
import threading

import pytest

import mpips
from mpips.store.runtime import errors


@pytest.mark.parametrize(
    "kind, others",
    [
        (mpips.StoreError, (mpips.CollectiveError, RuntimeError)),
        (mpips.StoreMismatchError, (mpips.StoreError, mpips.MismatchError, ValueError)),
        (mpips.StoreStallError, (mpips.StoreError, mpips.StallError, TimeoutError)),
    ],
)
def test_store_errors_are_errors_of_python_too(kind, others):
    assert all(issubclass(kind, other) for other in others)


def note(taken, number, error=None):
    def step():
        taken.append(number)
        if error is not None:
            raise error

    return step


@pytest.mark.parametrize("error", [ValueError("one"), KeyboardInterrupt(), SystemExit(3)])
def test_all_steps_are_taken_and_the_first_error_raised(error):
    taken = []
    with pytest.raises(type(error)) as caught:
        errors.in_order(*(note(taken, number, raised) for number, raised in enumerate([None, error, RuntimeError()])))
    assert caught.value is error and taken == [0, 1, 2]


@pytest.mark.parametrize("mine, raised", [(None, KeyboardInterrupt), (ValueError("mine"), ValueError)])
def test_an_interrupt_is_heard_when_the_work_is_done(mine, raised):
    done = []

    def work():
        with errors.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            note(done, 1, mine)()

    with pytest.raises(raised):
        work()
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_other_threads_leave_interrupts_as_they_are():
    done = []

    def work():
        with errors.uninterrupted():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGINT)]


def test_stores_close_at_exit_in_reverse_order(monkeypatch):
    monkeypatch.setattr(errors, "_closing", {})
    taken = []
    steps = [note(taken, number) for number in range(3)]
    for step in steps:
        errors.at_exit(step, list)
    errors.skip_at_exit(steps[1])
    errors.skip_at_exit(steps[1])
    errors._close_all()
    assert taken == [2, 0]
