"""How things end that must end: `mpips.store.runtime.errors`."""

from __future__ import annotations

import signal
import threading

import pytest

from mpips.store.runtime import errors


class Steps:
    """Steps that note that they were taken, and raise what they are told."""

    def __init__(self, *errors):
        self.taken = []
        self.steps = [self._step(number, error) for number, error in enumerate(errors)]

    def _step(self, number, error):
        def step():
            self.taken.append(number)
            if error is not None:
                raise error

        return step


@pytest.mark.parametrize("error", [ValueError("one"), KeyboardInterrupt(), SystemExit(3)])
def test_all_steps_are_taken_and_the_first_error_is_raised(error):
    steps = Steps(None, error, RuntimeError("two"), None)
    with pytest.raises(type(error)) as caught:
        errors.in_order(*steps.steps)
    assert caught.value is error and steps.taken == [0, 1, 2, 3]


def test_an_interrupt_is_heard_when_what_others_count_on_is_done():
    done = []

    def work():
        with errors.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_error_within_goes_before_an_interrupt():
    def work():
        with errors.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()


def test_other_threads_hear_no_interrupts():
    done = []

    def work():
        with errors.uninterrupted():
            done.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [signal.getsignal(signal.SIGINT)]


def test_the_last_that_was_opened_closes_first_and_what_is_closed_does_not(monkeypatch):
    monkeypatch.setattr(errors, "_closing", [])
    steps = Steps(None, None, None)
    for step in steps.steps:
        errors.at_exit(step)
    errors.skip_at_exit(steps.steps[1])
    errors.skip_at_exit(steps.steps[1])
    errors._close_all()
    assert steps.taken == [2, 0]
