"""From whom workers take over what they lack when a generation has ended."""

from __future__ import annotations

import msgspec

from mpips.store.replicated.reconcile import Having, Stand, Standing, settings_from, sources


def standing(
    round_: int, torn: bool = False, name: str = "w", size: int = 4, before: int | None = None, step: int = 0,
    state: list[str] | None = None,
) -> Standing:  # fmt: skip
    now = Stand(round_, step, state)
    whole = [*([] if torn else [now]), *([] if before is None else [Stand(before, step, state)])]
    return Standing(name, (size,), "float32", now, torn, whole)


def having(*keys: Standing, changes: int = 0, fresh: bool = False) -> Having:
    return Having(changes, b"", list(keys), fresh)


def taken(*every: Having):
    """Of key "w": from whom, at which round, who has it, whether nothing travels."""
    source = sources(every)[0]["w"]
    return source.rank, source.stand.round, source.holders, source.everybody


def test_nobody_takes_over_what_all_have():
    assert taken(having(standing(3)), having(standing(3))) == (0, 3, [0, 1], True)


def test_those_behind_take_from_the_lowest_rank_with_most_rounds():
    assert taken(having(standing(3)), having(standing(4)), having(standing(4))) == (1, 4, [1, 2], False)


def test_who_is_torn_takes_from_who_is_whole_whatever_its_rounds():
    assert taken(having(standing(4, torn=True)), having(standing(4)), having(standing(5))) == (2, 5, [2], False)


def test_where_all_are_torn_the_key_is():
    found, rounds = sources([having(standing(4, torn=True)), having(standing(4, torn=True))])
    assert rounds.torn == ("w",) and rounds.step is None
    assert found["w"].rank == 0 and not found["w"].everybody


def test_a_round_that_no_other_key_has_is_undone_by_all_who_can_and_others_take_it_over():
    ahead, behind = standing(5, before=4), standing(4, name="b")
    found, rounds = sources([having(ahead, behind), having(standing(5), behind), having(standing(4), behind)])
    assert rounds == {"w": 4, "b": 4} and rounds.step == 4
    assert (found["w"].rank, found["w"].holders) == (0, [0, 2])
    assert found["b"].everybody


def test_a_torn_key_is_undone():
    assert taken(having(standing(4, torn=True, before=4)), having(standing(4))) == (0, 4, [0, 1], True)


def test_who_has_just_begun_takes_all_and_hinders_nothing():
    found, rounds = sources([having(fresh=True), having(standing(4)), having(standing(4))])
    assert rounds.step == 4
    assert (found["w"].rank, found["w"].holders, found["w"].everybody) == (1, [1, 2], False)
    assert settings_from([having(fresh=True), having()]) == 1


def test_keys_that_somebody_lacks_are_forgotten():
    both = [having(standing(1), standing(2, name="b")), having(standing(2, name="b"))]
    assert list(sources(both)[0]) == ["b"]
    assert list(sources(both[::-1])[0]) == ["b"]


def test_a_key_made_otherwise_on_a_worker_is_forgotten():
    assert sources([having(standing(1)), having(standing(1, size=5))])[0] == {}


def test_who_has_missed_a_change_of_settings_takes_state_over():
    assert taken(having(standing(4), changes=1), having(standing(4), changes=2)) == (1, 4, [1], False)
    assert settings_from([having(changes=1), having(changes=2), having(changes=2)]) == 1


def test_another_state_is_taken_over():
    assert taken(having(standing(4, step=1)), having(standing(4, step=1)))[3]
    other = standing(4, step=1, state=["float32"])
    assert taken(having(standing(4, step=1)), having(other)) == (0, 4, [0], False)


def test_it_travels():
    told = having(standing(4, before=3, state=["float32"]), changes=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Having) == told
