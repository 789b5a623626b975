"""The plan of a recovery: one round for all keys where it can be had, and from whose memory; the living first."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.store.recovery.plan import (
    Inventory,
    KeyCard,
    OwnerInventory,
    RecoveryPlan,
    UnitCopy,
    choose_rounds,
    copies_of,
    make_plan,
)
from mpips.store.recovery.undo import AvailableRound

SIZE = 10


def owned(owner, *units, live=True):
    return OwnerInventory(owner, live, b"", list(units))


def unit(start, stop, *rounds, key="w", torn=False):
    return UnitCopy(key, start, stop, [AvailableRound(round_, round_) for round_ in rounds], torn, [])


def found(*owners, names="w", size=SIZE, synchronous=True):
    cards = [KeyCard(name, (size,), "float32") for name in names]
    return choose_rounds([Inventory(list(owners), keys=cards)], synchronous)


def test_shards_that_were_a_round_further_go_back():
    seen = found(owned(4, unit(0, 6, 3, 2)), owned(5, unit(6, 10, 2), live=False))
    assert seen.step == 2 and seen.keys["w"].round == 2 and not seen.keys["w"].torn
    assert [(piece.owner, piece.before) for piece in seen.keys["w"].slices] == [(4, True), (5, False)]


def test_a_key_without_a_common_round_is_torn():
    seen = found(owned(4, unit(0, 6, 5, 4)), owned(5, unit(6, 10, 2, 1)))
    assert seen.keys["w"].torn and seen.keys["w"].round == 5 and seen.step is None
    assert not any(piece.before for piece in seen.keys["w"].slices)


def test_a_key_of_which_a_part_is_nowhere_is_lost():
    seen = found(owned(4, unit(0, 6, 5), unit(0, 10, 5, key="v")), names="wv")
    assert seen.lost == ["w"] and list(seen.keys) == ["v"]


def test_asynchronous_shards_stand_each_at_its_own():
    seen = found(owned(4, unit(0, 6, 5)), owned(5, unit(6, 10, 2)), synchronous=False)
    assert seen.keys["w"].round == 5 and not seen.keys["w"].torn and seen.step is None


def test_an_empty_key_is_had_from_anybody():
    seen = found(owned(4, unit(0, 0, 1)), size=0)
    assert seen.keys["w"].slices[0].owner == 4 and seen.keys["w"].round == 1


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10), st.integers(0, 2), st.booleans()), max_size=9))
def test_parts_cover_the_key_once_and_the_living_give_what_they_have(units):
    owners = [
        owned(owner, unit(start, min(SIZE, start + length), round_), live=live)
        for owner, (start, length, round_, live) in enumerate(units)
    ]
    seen = found(*owners)
    if "w" not in seen.keys:
        return
    chosen = seen.keys["w"]
    assert [piece.start for piece in chosen.slices] == [0, *(piece.stop for piece in chosen.slices)][:-1]
    assert chosen.slices[-1].stop == SIZE
    for piece in chosen.slices:
        (copy,) = owners[piece.owner].units
        assert copy.start <= piece.start < piece.stop <= copy.stop
        assert chosen.torn or copy.rounds[0][0] == chosen.round
        here = [
            one
            for one in owners
            if one.live
            and one.units[0].start <= piece.start < one.units[0].stop
            and (chosen.torn or one.units[0].rounds[0][0] == chosen.round)
        ]
        assert owners[piece.owner].live or not here


def test_copies_count_only_where_servers_own_memory_is_not_all_there():
    copies = owned(copies_of(5), unit(0, 6, 3, 2), live=False)
    seen = found(owned(4, unit(0, 6, 3, 2), live=False), owned(5, unit(6, 10, 3, 2)), copies)
    assert seen.step == 3 and [piece.owner for piece in seen.keys["w"].slices] == [4, 5]
    seen = found(owned(5, unit(6, 10, 4, 3)), copies)
    assert seen.step == 3
    assert [(piece.owner, piece.before) for piece in seen.keys["w"].slices] == [(copies_of(5), False), (5, True)]
    assert found(copies).lost == ["w"]


def test_the_newest_of_two_copies_counts_where_there_are_no_rounds():
    old, new = owned(copies_of(5), unit(0, 10, 3), live=False), owned(copies_of(6), unit(0, 10, 4), live=False)
    for owners in [(old, new), (new, old)]:
        seen = found(*owners, synchronous=False)
        assert seen.keys["w"].round == 4 and [piece.owner for piece in seen.keys["w"].slices] == [copies_of(6)]


@pytest.mark.parametrize(
    ("available", "rounds", "step"),
    [
        pytest.param({}, {}, 0, id="no keys"),
        pytest.param({"a": {3}, "b": {3}}, {"a": 3, "b": 3}, 3, id="all alike"),
        pytest.param({"a": {4, 3}, "b": {3, 2}}, {"a": 3, "b": 3}, 3, id="one is undone"),
        pytest.param({"a": {4, 3}, "b": {4}}, {"a": 4, "b": 4}, 4, id="all have come through"),
        pytest.param({"a": {4}, "b": {3}}, {"a": 4, "b": 3}, None, id="one cannot be undone"),
        pytest.param({"a": {9, 8}, "b": {4, 3}}, {"a": 9, "b": 4}, None, id="pushed at another rate"),
        pytest.param({"a": {9, 8}, "b": {0}}, {"a": 9, "b": 0}, 9, id="one that is never pushed"),
        pytest.param({"a": {1, 0}, "b": {0}}, {"a": 0, "b": 0}, 0, id="the first round has broken off"),
    ],
)
def test_all_keys_stand_at_the_newest_round_that_all_can(available, rounds, step):
    assert stand(available, True) == (rounds, step)


def test_keys_of_an_asynchronous_store_stand_each_at_its_own():
    assert stand({"a": {4, 3}, "b": {3, 2}}, False) == ({"a": 4, "b": 3}, None)


def stand(available, synchronous):
    units = [unit(0, SIZE, *sorted(rounds, reverse=True), key=name) for name, rounds in available.items()]
    seen = found(owned(4, *units), names=list(available), synchronous=synchronous)
    assert not any(one.torn for one in seen.keys.values())
    return {name: one.round for name, one in seen.keys.items()}, seen.step


# ---- replicas


def replica(
    round_: int,
    torn: bool = False,
    name: str = "w",
    size: int = 4,
    before: int | None = None,
    step: int | None = None,
) -> tuple[KeyCard, UnitCopy]:
    """A replica with the rounds that it can be put to; a torn one has what it holds where there is none."""
    rounds = [*([] if torn else [round_]), *([] if before is None else [before])]
    available = [AvailableRound(each, step) for each in rounds or [round_]]
    copy = UnitCopy(name, 0, size, available, not rounds, [] if step is None else ["float32"])
    return KeyCard(name, (size,), "float32"), copy


def planned(*workers: list[tuple[KeyCard, UnitCopy]] | None, changes: tuple[int, ...] = (0,) * 9) -> RecoveryPlan:
    """The plan for workers with these replicas, after so many changes of settings; None: one that has just begun."""
    said = [
        Inventory()
        if keys is None
        else Inventory(
            [OwnerInventory(rank, True, b"", [copy for _, copy in keys], changes[rank])],
            keys=[card for card, _ in keys],
        )
        for rank, keys in enumerate(workers)
    ]
    layout = SimpleNamespace(num_servers=0, num_workers=len(said))
    return make_plan(layout, said, choose_rounds(said, True, True))


@pytest.mark.parametrize(
    ("workers", "root", "round_", "holders", "everybody"),
    [
        pytest.param([replica(3), replica(3)], 0, 3, [0, 1], True, id="nobody takes over what all have"),
        pytest.param([replica(3), replica(4), replica(4)], 1, 4, [1, 2], False, id="those behind take"),
        pytest.param([replica(4, torn=True), replica(4), replica(5)], 2, 5, [2], False, id="who is torn takes"),
        pytest.param([replica(4, torn=True, before=4), replica(4)], 0, 4, [0, 1], True, id="a torn key is undone"),
        pytest.param([replica(4), replica(4, step=1)], 0, 4, [0], False, id="another state is taken over"),
        pytest.param([replica(4, torn=True)] * 2, 0, 4, [0, 1], False, id="all are torn"),
    ],
)
def test_replicas_take_from_the_lowest_rank_that_has_the_round(workers, root, round_, holders, everybody):
    plan = planned(*([one] for one in workers)).replicas["w"]
    assert (plan.root, plan.round, plan.holders, plan.everybody) == (root, round_, holders, everybody)


def test_where_all_replicas_are_torn_the_key_is():
    rounds = planned([replica(4, torn=True)], [replica(4, torn=True)]).rounds
    assert rounds.torn == ("w",) and rounds.step is None


def test_a_round_that_no_other_key_has_is_undone_by_all_who_can_and_others_take_it_over():
    ahead, behind = replica(5, before=4), replica(4, name="b")
    plan = planned([ahead, behind], [replica(5), behind], [replica(4), behind])
    assert plan.rounds == {"w": 4, "b": 4} and plan.rounds.step == 4
    assert (plan.replicas["w"].root, plan.replicas["w"].holders) == (0, [0, 2])
    assert plan.replicas["b"].everybody


def test_who_has_just_begun_takes_all_and_hinders_nothing():
    plan = planned(None, [replica(4)], [replica(4)])
    assert plan.rounds.step == 4 and plan.best_settings.owner == 1
    assert plan.replicas["w"][:1] == (1,) and plan.replicas["w"].holders == [1, 2] and not plan.replicas["w"].everybody


def test_keys_that_somebody_lacks_or_has_made_otherwise_are_forgotten():
    both = [[replica(1), replica(2, name="b")], [replica(2, name="b")]]
    assert list(planned(*both).replicas) == list(planned(*both[::-1]).replicas) == ["b"]
    assert planned([replica(1)], [replica(1, size=5)]).replicas == {}


def test_who_has_missed_a_change_of_settings_takes_state_over():
    plan = planned([replica(4)], [replica(4)], [replica(4)], changes=(1, 2, 2))
    assert plan.replicas["w"].root == 1 and plan.replicas["w"].holders == [1, 2] and plan.best_settings.owner == 1


def test_an_inventory_travels():
    card, copy = replica(4, before=3, step=1)
    told = Inventory([OwnerInventory(0, True, b"x", [copy], 3)], [2], [card], changes=(1, 2, b"y"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Inventory) == told
