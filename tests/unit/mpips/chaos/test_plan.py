"""Plans of faults: drawn from a seed, saved, replayed, refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpips.chaos import KINDS, ROLES, Fault, FaultPlan, PlanError, Point, Whom, check_lab, draw, load, save


def test_a_seed_gives_one_plan() -> None:
    plan = draw(7, 5, 3.0, KINDS, ROLES)
    assert plan == draw(7, 5, 3.0, KINDS, ROLES) != draw(8, 5, 3.0, KINDS, ROLES)
    assert len(plan.faults) == 5 and plan.seed == 7


def test_faults_come_one_after_the_other_in_the_mean_so_often() -> None:
    times = [fault.at for fault in draw(1, 200, 10.0).faults if isinstance(fault.at, float)]
    gaps = [after - before for before, after in zip([0.0, *times], times)]
    assert len(times) == 200 and min(gaps) >= 4.99 and max(gaps) <= 15.01
    assert 9 < sum(gaps) / len(gaps) < 11


def test_only_what_lasts_has_seconds() -> None:
    for fault in draw(3, 50, 1.0, KINDS, seconds=2.5).faults:
        assert fault.seconds == (0 if fault.kind in ("kill", "host") else 2.5)


def test_only_slow_links_have_a_share_of_their_rate() -> None:
    faults = draw(3, 50, 1.0, KINDS).faults
    assert len({fault.share for fault in faults if fault.kind == "slow"}) > 3
    assert all((0 < fault.share < 1) == (fault.kind == "slow") for fault in faults)


@pytest.mark.parametrize("kind", ["host", "cut", "slow"])
def test_faults_of_hosts_need_a_lab(kind: str) -> None:
    check_lab(draw(1, 3, 1.0, [kind]), "mine")
    check_lab(draw(1, 3, 1.0, ["kill", "stop", "full"]), "")
    with pytest.raises(PlanError, match=f"'{kind}' is a fault of a lab's hosts, and no lab is named"):
        check_lab(draw(1, 3, 1.0, [kind]), "")


def test_a_saved_plan_is_the_same(tmp_path: Path) -> None:
    at = Point(2, "recover", 1, 0.004)
    plan = FaultPlan(3, (Fault("kill", Whom("rank", 5), at), Fault("stop", Whom("server", 1), 2.5, 1.0)))
    save(plan, tmp_path / "plan.json")
    assert load(tmp_path / "plan.json") == plan


@pytest.mark.parametrize(
    "text, said",
    [
        ("[]", "Expected `object`"),
        ('{"faults": [{"kind": "burn", "whom": {"role": "any", "number": 1}, "at": 1}]}', "burn"),
        ('{"faults": [{"kind": "kill", "whom": {"role": "any", "number": 1}, "at": -1}]}', "below 0"),
        ('{"faults": [{"kind": "stop", "whom": {"role": "any", "number": 1}, "at": 1}]}', "lasts 0 seconds"),
        ('{"faults": [{"kind": "kill", "whom": {"role": "any", "number": 1}, "at": 1, "share": 0}]}', "share of 0"),
        ('{"faults": [{"kind": "kill", "whom": {"role": "any", "number": 1}, "at": {"rank": 0, "call": "x"}}]}', "'x'"),
    ],
)
def test_a_file_without_a_plan_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=said):
        load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_a_plan_that_cannot_be_is_not_drawn() -> None:
    with pytest.raises(PlanError, match="burn"):
        draw(1, 1, 1.0, ["burn"])
    with pytest.raises(PlanError, match="lasts 0 seconds"):
        draw(1, 1, 1.0, ["stop"], seconds=0)
