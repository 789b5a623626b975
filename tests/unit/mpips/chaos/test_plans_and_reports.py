"""Plans of faults: drawn from a seed, saved, replayed, refused. Reports: made from what ranks told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from mpips.chaos import (
    KINDS,
    ROLES,
    Fault,
    FaultAttempt,
    FaultPlan,
    PlanError,
    Point,
    ProgramNote,
    StoreCreated,
    StoreRecovered,
    WatchedRun,
    Whom,
    check_lab,
    draw,
    injector,
    judge,
    load,
    save,
)
from mpips.chaos.injector import Message


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


RANKS = 3


def note(time: float, rank: int, step: int, value: float | None = None, worker: int | None = None) -> ProgramNote:
    found = float(step) if value is None else value
    return ProgramNote(time, rank, rank if worker is None else worker, RANKS, step, found, f"{found}")


def steps(first: float, *numbers: int, ranks: tuple[int, ...] = (0, 1, 2)) -> list[Message]:
    """All ranks note these steps, a second apart, rank r r hundredths later."""
    return [note(first + turn + rank / 100, rank, step) for turn, step in enumerate(numbers) for rank in ranks]


def run(told: list[Message], *faults: tuple[str, float, int], **more: object) -> WatchedRun:
    made = [
        FaultAttempt(number, time, rank, "worker", killed=(rank,) * (kind == "kill"))
        for number, (kind, time, rank) in enumerate(faults)
    ]
    plan = FaultPlan(0, tuple(Fault(kind, Whom("rank", rank), time, 1.0) for kind, time, rank in faults))
    return WatchedRun(plan, ended=100.0, messages=[StoreCreated(0.0, 0, 0, RANKS), *told], attempts=made, **more)


def recovered(time: float, *ranks: int) -> list[Message]:
    return [StoreRecovered(time, rank, rank, RANKS, None) for rank in ranks]


def test_a_job_without_faults_is_good() -> None:
    report = judge(run(steps(1, 0, 1, 2)), run(steps(5, 0, 1, 2)))
    assert report.good and report.bits == "equal" and report.percentile(50) is None
    assert (report.repeated, report.skipped, report.faults) == (0, 0, [])


def test_a_rank_that_stops_keeps_others_from_new_steps() -> None:
    told = [*steps(1, 0, 1), *steps(7, 2, 3)]
    (fault,) = judge(run(told, ("stop", 2.5, 1))).faults
    assert fault.seconds == 7.02 - 2.5 and fault.at == 2.5


def test_what_was_under_way_is_no_going_on() -> None:
    """Rank 1 dies as the others end round 1; they recover, and all that are left note step 1 again."""
    told = [*steps(1, 0), *steps(2, 1, ranks=(0, 2)), *recovered(2.2, 0, 2), *steps(3, 1, 2, ranks=(0, 2))]
    report = judge(run(told, ("kill", 1.9, 1)))
    assert report.faults[0].seconds is not None
    assert abs(report.faults[0].seconds - (3.02 - 1.9)) < 1e-9
    assert report.repeated == 0 and report.bits == ""


def test_two_faults_may_share_a_recovery() -> None:
    told = [*steps(1, 0, 1), *recovered(4, 0), *steps(5, 2, ranks=(0,))]
    first, second = judge(run(told, ("kill", 2.5, 1), ("kill", 2.6, 2))).faults
    assert (first.seconds, second.seconds) == (2.5, 5 - 2.6)


def test_a_later_recovery_is_not_of_an_earlier_fault() -> None:
    told = [*steps(1, 0, 1, 2, 3), *recovered(8, 0, 2), *steps(9, 4, ranks=(0, 2))]
    first, second = judge(run(told, ("stop", 1.5, 1), ("kill", 7, 1))).faults
    assert first.seconds is not None and abs(first.seconds - 0.52) < 1e-9
    assert second.seconds is not None and abs(second.seconds - 2.02) < 1e-9


def test_nobody_goes_on() -> None:
    report = judge(run(steps(1, 0, 1), ("kill", 3, 1), code=137))
    assert report.faults[0].seconds is None and not report.good


def test_rounds_done_again_and_steps_that_nobody_noted_are_counted() -> None:
    told = [*steps(1, 0, 1, 2), *recovered(4.5, 0, 1, 2), *steps(5, 1, 2, 4)]
    report = judge(run(told, ("stop", 4, 1)))
    assert (report.repeated, report.skipped) == (1, 1)


def test_bits_that_differ_are_told() -> None:
    good = steps(1, 0, 1, 2)
    assert judge(run([*good, note(9, 0, 1, 7.5)])).bits == "differ from step 1 of worker 0 on: 7.5, not 1.0"
    other = [*steps(1, 0, 1), *[note(3, rank, 2, 2.5) for rank in range(RANKS)]]
    report = judge(run(other), run(good))
    assert report.bits == "differ from step 2 of worker 0 on: 2.5, not 2.0" and not report.good
    assert judge(run(steps(1, 0, 1)), run(good)).bits == "step 2 of the reference was not noted"
    fewer = [ProgramNote(1, 0, 0, RANKS - 1, 0, 0.0, "0.0"), *steps(2, 1, 2)]
    assert judge(run(fewer), run(good)).bits == "step 0 has 2 workers, and 3 in another run of it"


def test_a_spare_in_a_dead_ranks_place_has_its_bits() -> None:
    told = [*steps(1, 0, 1), *recovered(3.2, 0, 1), *steps(4, 2, ranks=(0, 1)), note(4, 6, 2, worker=2)]
    assert judge(run(told, ("kill", 3, 2)), run(steps(1, 0, 1, 2))).good


def test_faults_that_were_not_made_say_why() -> None:
    found = run(steps(1, 0), ("kill", 3, 1))
    found.attempts = []
    assert judge(found).faults[0].undone == "the job ended before"


def test_the_nearest_rank_is_the_percentile() -> None:
    told = [one for turn in range(10) for one in steps(1 + 10 * turn, turn)]
    faults = [("stop", 11 + 10 * turn - seconds, 0) for turn, seconds in enumerate([1.0, 2.0, 3.0, 4.0])]
    report = judge(run(told, *faults))
    assert report.percentile(50) is not None and round(report.percentile(50) or 0, 2) == 2.02
    assert round(report.percentile(99) or 0, 2) == 4.02


def test_all_ranks_of_a_lost_host_are_not_waited_for() -> None:
    told = [*steps(1, 0, 1), *steps(3, 2, 3, ranks=(0,))]
    made = run(told, ("host", 2.5, 1))
    made.attempts = [FaultAttempt(0, 2.5, 1, "worker", "h1", (1, 2))]
    (fault,) = judge(made).faults
    assert (fault.host, fault.rank) == ("h1", 1) and fault.seconds == 3 - 2.5


def test_weights_of_torch_are_noted_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    told: list[ProgramNote] = []
    watching = SimpleNamespace(rank=0, place=lambda: (0, 1), send=told.append)
    monkeypatch.setattr(injector, "_injectors", [watching])
    weights = torch.arange(4.0, requires_grad=True)
    for value in (weights, weights.detach().numpy(), weights.bfloat16(), weights.sum()):
        injector.note(3, value)
    first, same, halves, loss = told
    assert first.digest == same.digest != halves.digest and loss.value == 6.0
