"""Warnings are shown at the line of the user's program that led to them."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from collectives import errors


def through(*modules):
    """A warning, given by a function of the last module that one of the module before calls, and so on."""
    call = partial(errors.warn, "rank 2 has not come")
    for module in reversed(modules):
        namespace = {"__name__": module}
        exec(compile("def call(inner):\n    inner()\n", f"{module}.py", "exec"), namespace)
        call = partial(namespace["call"], call)
    return call


def test_a_warning_is_at_the_users_line_however_deep_it_comes_from():
    with pytest.warns(RuntimeWarning, match="rank 2") as told:
        through("library", "train", "mpips.store", "mpips.collectives.fabric.wait")()
    assert [(warning.filename, warning.lineno) for warning in told] == [("train.py", 2)]


def test_in_a_thread_of_ours_it_is_at_our_line():
    def in_a_thread(call):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    with pytest.warns(RuntimeWarning) as told:
        in_a_thread(through("mpips.engine"))
    assert told[0].filename == "mpips.engine.py"
