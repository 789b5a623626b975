"""Numbers of units: never the same twice, and no two in use with the same tags."""

from __future__ import annotations

import pytest

from mpips import tags
from mpips.tags import Numbers, pull_tag, push_tag


def test_no_two_units_in_use_share_a_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "most_units", lambda: 5)
    numbers = Numbers()
    used = [numbers.take("a") for _ in range(5)]
    given = list(used)
    for turn in range(23):
        numbers.give([used.pop(turn % 3)])
        used.append(numbers.take("a"))
        given.append(used[-1])
        assert len({tag(number) for number in used for tag in (push_tag, pull_tag)}) == 10
    assert len(set(given)) == len(given)


def test_when_all_tags_are_in_use_the_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "most_units", lambda: 2)
    numbers = Numbers()
    numbers.give([numbers.take("a")])
    numbers.take("b")
    numbers.take("b")
    with pytest.raises(ValueError, match="key 'c': this MPI has tags for 2 units"):
        numbers.take("c")


def test_tags_are_what_mpi_allows() -> None:
    most = tags.most_units()
    assert most > 16000
    assert push_tag(most - 1) + 1 == pull_tag(most - 1) < max(32767, 2 * most + 16)
