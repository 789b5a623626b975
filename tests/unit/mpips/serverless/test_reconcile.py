"""From whom workers take over what they lack when an epoch has ended."""

from __future__ import annotations

import msgspec

from mpips.serverless.reconcile import Having, Standing, settings_from, sources


def standing(round_: int, torn: bool = False, name: str = "w", size: int = 4, step: int = 0) -> Standing:
    return Standing(name, size, "float32", round_, torn, step, None)


def having(*keys: Standing, changes: int = 0) -> Having:
    return Having(changes, b"", list(keys))


def test_nobody_takes_over_what_all_have():
    found = sources([having(standing(3)), having(standing(3))])
    assert found["w"].rank == -1 and found["w"].standing.round == 3 and not found["w"].torn


def test_those_behind_take_from_the_lowest_rank_with_most_rounds():
    found = sources([having(standing(3)), having(standing(4)), having(standing(4))])
    assert (found["w"].rank, found["w"].standing.round) == (1, 4)


def test_who_is_torn_takes_from_who_is_whole_whatever_its_rounds():
    found = sources([having(standing(4, torn=True)), having(standing(4)), having(standing(5))])
    assert (found["w"].rank, found["w"].standing.round, found["w"].torn) == (2, 5, False)


def test_where_all_are_torn_the_key_is():
    found = sources([having(standing(4, torn=True)), having(standing(4, torn=True))])
    assert found["w"].torn and found["w"].rank == 0


def test_keys_that_somebody_lacks_are_forgotten():
    both = [having(standing(1), standing(2, name="b")), having(standing(2, name="b"))]
    assert list(sources(both)) == ["b"]
    assert list(sources(both[::-1])) == ["b"]


def test_a_key_made_otherwise_on_a_worker_is_forgotten():
    assert sources([having(standing(1)), having(standing(1, size=5))]) == {}


def test_who_has_missed_a_change_of_settings_takes_state_over():
    found = sources([having(standing(4), changes=1), having(standing(4), changes=2)])
    assert found["w"].rank == 1
    assert settings_from([having(changes=1), having(changes=2), having(changes=2)]) == 1


def test_another_state_is_taken_over():
    found = sources([having(standing(4, step=1)), having(standing(4, step=1))])
    assert found["w"].rank == -1
    other = Standing("w", 4, "float32", 4, False, 1, ["float32"])
    assert sources([having(standing(4, step=1)), having(other)])["w"].rank == 0


def test_it_travels():
    told = having(standing(4), changes=3)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Having) == told
