"""What is shown of an uncaught error, and which errors are the same for all ranks: decided without MPI."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import mpips
from collectives.errors import of_caller
from mpips.ending import uncaught


def ours(code: str) -> Callable[..., Any]:
    """The function `call`, as if it stood in this package."""
    names: dict[str, Any] = {"__name__": "mpips.made_up", "of_caller": of_caller}
    exec(code, names)
    function: Callable[..., Any] = names["call"]
    return function


def raised(call: Callable[..., object], *words: object) -> BaseException:
    try:
        call(*words)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, uncaught._users(error, error.__traceback__)))


refuse = ours("def call(words):\n    inner(words)\ndef inner(words):\n    raise of_caller(ValueError(words))\n")


def test_the_rank_in_front_does_not_tell_sentences_apart_and_all_else_does() -> None:
    words = "rank {}: pull: key 'v' was not initialised"
    assert uncaught._nameless(words.format(0)) == uncaught._nameless(words.format(31))
    assert uncaught._nameless(words.format(0)) != uncaught._nameless(words.format(0).replace("'v'", "'w'"))
    for other in ("rank 1 waits for ranks [0]", "init: rank 1: no array", "the rank 1: of 2"):
        assert uncaught._nameless(other) == other
    assert uncaught._nameless("rank 0: rank 1: twice") == "rank 1: twice"


def test_a_refused_argument_is_shown_with_the_lines_of_the_caller_alone() -> None:
    text = shown(raised(refuse, "rank 0: push: no"))
    assert "ValueError: rank 0: push: no" in text
    assert text.count('  File "') == 1
    assert __file__ in text


def test_an_error_of_ours_that_nobody_meant_keeps_all_its_lines() -> None:
    text = shown(raised(ours("def call():\n    inner()\ndef inner():\n    [][0]\n")))
    assert text.count('  File "') == 3


def test_what_we_raise_ourselves_ends_at_the_callers_line_also_below_other_packages() -> None:
    inside = {"__name__": "contextlib", "call": ours("def call():\n    raise TypeError('wrong')\n")}
    exec("def between():\n    call()\n", inside)
    text = shown(raised(lambda: inside["between"]()))
    assert text.count('  File "') == 2, text  # this function's, and that of the helper `raised`
    assert "TypeError: wrong" in text


def test_a_promise_of_ours_that_does_not_hold_keeps_all_its_lines() -> None:
    text = shown(raised(ours("def call():\n    raise AssertionError('ours')\n")))
    assert text.count('  File "') == 2, text


def test_what_a_call_of_the_users_raises_inside_ours_is_shown_without_our_lines() -> None:
    def forward() -> None:
        raise KeyError("x")

    error = raised(ours("def call(function):\n    function()\n"), forward)
    text = shown(error)
    assert text.count('  File "') == text.count(__file__) == 2, text
    assert ": KeyError: 'x' (test_uncaught.py:" in f": {uncaught._sentence(KeyError, error, error.__traceback__)}"


def test_an_error_of_a_package_that_we_called_keeps_all_lines_and_of_one_that_the_user_called_names_the_users() -> None:
    """The user's line is what `mpips why` names, though the package's own line is the innermost one."""
    loads = ours("import json\ndef call(text):\n    json.loads(text)\n")
    text = shown(raised(loads, "{"))
    assert text.count('  File "<string>"') == 1 and "json" in text, text

    def forward() -> None:
        json.loads("{")

    error = raised(ours("def call(function):\n    function()\n"), forward)
    text = shown(error)
    assert '  File "<string>"' not in text and "json" in text, text
    sentence = uncaught._sentence(ValueError, error, error.__traceback__)
    assert "test_uncaught.py:" in sentence and "decoder.py" not in sentence


def test_what_we_caught_on_the_way_is_not_shown_and_what_the_caller_caught_is() -> None:
    text = shown(
        raised(
            ours(
                "def call():\n    try:\n        {}['x']\n    except KeyError:\n"
                "        raise of_caller(ValueError('no'))\n"
            )
        )
    )
    assert "KeyError" not in text

    def caller() -> None:
        try:
            {}["x"]
        except KeyError:
            refuse("no")

    assert "KeyError" in shown(raised(caller))


def test_a_traceback_names_errors_as_programs_catch_them() -> None:
    names = [name for name in mpips.__all__ if name.endswith("Error")]
    assert "StoreError" in names
    for name in names:
        text = shown(raised(ours("def call(error):\n    raise error\n"), getattr(mpips, name)("no")))
        assert text.splitlines()[-1] == f"mpips.{name}: no"


def test_a_sentence_of_ours_is_the_same_wherever_it_is_raised() -> None:
    late = raised(ours("def call(words):\n    raise of_caller(RuntimeError(words))\n"), "rank 1: push: no")
    first = raised(refuse, "rank 1: push: no")
    assert uncaught._identity(first, first.__traceback__) == uncaught._identity(late, late.__traceback__)


@pytest.mark.parametrize("other", [lambda: int("x"), lambda: {}["x"]])
def test_other_errors_are_the_same_only_from_the_same_line(other: Callable[[], object]) -> None:
    def here() -> int:
        return int("x")

    first, again, another = raised(here), raised(here), raised(other)
    assert uncaught._identity(first, first.__traceback__) == uncaught._identity(again, again.__traceback__)
    assert uncaught._identity(first, first.__traceback__) != uncaught._identity(another, another.__traceback__)
