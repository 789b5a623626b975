"""The paragraph of `mpips why`: who waits for whom, and what that rank does, from how ranks look from outside."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from click import UsageError
from click.testing import CliRunner

import mpips
from collectives.recorder import folders
from collectives.recorder.page import LastCall
from launch.observe import __main__ as command
from launch.observe.explain import explain
from launch.observe.gather import OngoingWait, Rank, StackFrame

MPIPS = Path(mpips.__file__).parent
USUAL: dict[str, Any] = {
    "size": 3,
    "role": "worker",
    "host": "here",
    "program": ("/home/u/train.py",),
    "generation": 0,
    "step": 412,
    "step_seconds": 1.0,
    "waits": (),
    "lanes": (),
    "end": {},
    "state": "R",
    "cpu": 0.5,
    "waiting": 0.1,
    "moved": True,
    "stack": (StackFrame("/home/u/train.py", 7, "<module>"),),
    "memory_bytes": 1,
    "began": 0.0,
    "waited_seconds": 0.0,
    "wait_count": 0,
    "calls": 0,
    "failures": 0,
    "checkpoints": 0,
    "cpu_seconds": 0.0,
    "notes": {},
    "threads": (),
    "member": -1,
    "became": "",
    "step_rate": -1.0,
}
WAITS = (OngoingWait("pushpull of key 'w'", 83.4, (2,), "train.py:41"),)


def rank(number: int, **differs: Any) -> Rank:
    return Rank(**{**USUAL, "rank": number, "pid": 100 + number, **differs})


def waiting(*others: Rank, **differs: Any) -> list[Rank]:
    """Ranks 0 and 1 wait for rank 2."""
    return [rank(0, waits=WAITS), rank(1, waits=WAITS), *(others or (rank(2, **differs),))]


BEGIN = (
    "job 4711 (train.py, 3 ranks) has been stuck for 83 s in step 412: ranks 0, 1 wait in pushpull of key 'w' "
    "(train.py:41), for "
)


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"cpu": 0.98}, "rank 2, which is in Python code outside mpips (train.py:7), not stopped, 98 % CPU."),
        ({"state": "T"}, "rank 2, which is stopped by a signal: `kill -CONT 102` lets it go on."),
        ({"state": "D"}, "rank 2, which waits in the kernel for a disk or a file system (train.py:7)."),
        ({"state": ""}, "rank 2, whose process 102 is gone, without a word."),
        ({"state": "", "end": {"failed": "no space"}}, "rank 2, whose process 102 is gone: no space."),
        ({"stack": ()}, "rank 2, whose stack is unknown, not stopped, 50 % CPU."),
        (
            {"stack": (StackFrame(str(MPIPS / "store/api.py"), 3, "push"), *USUAL["stack"])},
            "rank 2, which is in a call of mpips (train.py:7), not stopped, 50 % CPU.",
        ),
    ],
)
def test_a_rank_that_others_wait_for_is_described(differs: dict[str, Any], said: str) -> None:
    found = explain("4711", waiting(**differs))
    assert (found.kind, found.culprits, found.sentence) == ("stands", (2,), BEGIN + said)


def test_another_thread_of_the_late_rank_is_shown(tmp_path: Path) -> None:
    library = StackFrame("/usr/lib/python3.11/threading.py", 1, "join")
    thread = (library, StackFrame("/home/u/data.py", 70, "load"))
    found = explain("4711", waiting(stack=(library, *USUAL["stack"]), cpu=0.0, threads=((library,), thread)))
    assert found.sentence == BEGIN + (
        "rank 2, which is in Python code outside mpips (train.py:7), not stopped, 0 % CPU; "
        "its other thread is at data.py:70, load."
    )


def test_a_wait_of_a_second_thread_says_so() -> None:
    late = (WAITS[0]._replace(thread="pusher"),)
    found = explain("4711", [rank(0, waits=late), rank(1, waits=late), rank(2)])
    assert "wait in pushpull of key 'w' (train.py:41, in its thread pusher), for rank 2" in found.sentence


def test_a_rank_that_is_another_program_now_is_not_gone_silently() -> None:
    found = explain("4711", waiting(state="", became="sleep 30"))
    assert "rank 2, whose process 102 has become another program by exec, `sleep 30`." in found.sentence


def test_a_line_joins_the_parentheses_of_its_call() -> None:
    late = (WAITS[0]._replace(what="push of key 'w' (sum)"),)
    assert "in push of key 'w' (sum; train.py:41), for" in explain("1", [rank(0, waits=late), rank(2)]).sentence


def test_a_rank_without_which_the_job_goes_on_is_not_blamed() -> None:
    dead = rank(3, state="", generation=0, size=4)
    late = [rank(number, waits=WAITS, generation=1, size=4) for number in (0, 1)]
    assert explain("1", [*late, rank(2, generation=1, size=4), dead]).culprits == (2,)
    over = [one._replace(state="", end={"failed": "no space"}) for one in late]
    assert explain("1", [*over, dead]).culprits == (0, 1)


def test_an_interrupted_job_says_so() -> None:
    ranks = [rank(number, state="") for number in range(3)]
    found = explain("1", ranks, {"heard": "SIGINT"})
    assert found.sentence.endswith("has ended in step 412: its `mpips run` was told to end by SIGINT (Ctrl-C).")


def test_the_rank_whose_death_the_launcher_saw_is_to_blame() -> None:
    ranks = [rank(number, state="") for number in range(3)]
    found = explain("1", ranks, {"death": "rank 1 (worker) was ended by SIGKILL", "sentence": ""})
    assert found.culprits == (1,) and found.sentence.endswith(
        "has ended. Rank 1 (worker) was ended by SIGKILL. The others were ended with the job."
    )


def test_what_two_ranks_say_in_two_forms_is_said_once() -> None:
    told = "pushpull of key 'w': rank 1 is needed, and its process has ended."
    ranks = [
        rank(0, state="", end={"failed": f"StoreError: {told} (stand.py:11)"}),
        rank(1, state=""),
        rank(2, state="", end={"failed": told}),
    ]
    found = explain("1", ranks, {"death": "rank 1 (worker) was ended by SIGKILL"})
    assert found.sentence.endswith(f" Others said: StoreError: {told} (stand.py:11).")


def test_the_newest_job_is_one_of_which_something_is_known(job: list[subprocess.Popen[str]]) -> None:
    for one in job:
        one.kill()
        one.wait()
    newer = folders.jobs_folder() / "78"
    newer.mkdir(mode=0o700)
    (newer / "1.page").touch()
    assert command.find(None) == folders.jobs_folder() / "77"


def test_a_job_is_found_by_its_allocation_where_no_other_is_in_it(
    job: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = [folders.jobs_folder() / name for name in ("77.p1", "77.p2", "771.p3", "8.0")]
    monkeypatch.setattr(command, "jobs", lambda: known)
    assert [command.find(name).name for name in ("771", "8", "77.p2")] == ["771.p3", "8.0", "77.p2"]
    with pytest.raises(UsageError, match=r"2 jobs of yours are in 77: name one of 77\.p1, 77\.p2"):
        command.find("77")
    monkeypatch.setattr(command, "has_live_ranks", lambda folder: folder == known[1])
    assert command.find("77") == known[1]


@pytest.mark.slow
def test_another_job_that_runs_is_named(job: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "jobs", lambda: [folders.jobs_folder() / "78", folders.jobs_folder() / "77"])
    monkeypatch.setattr(command, "has_live_ranks", lambda folder: True)
    said = CliRunner().invoke(command.command, ["why"]).output
    assert "(This is your newest job here; job 78 runs, too: name one by `mpips why JOB`.)" in said


def test_the_line_of_the_program_is_shown_where_it_can_be_read() -> None:
    found = explain("1", waiting(stack=(StackFrame("/home/u/train.py", 2, "load", "batch = os.read(0, 9)"),)))
    assert "(train.py:2, load: `batch = os.read(0, 9)`)" in found.sentence


def test_a_rank_without_a_page_runs_elsewhere_or_has_not_begun() -> None:
    found = explain("1", [rank(0, waits=WAITS), rank(1, waits=WAITS)])
    assert found.culprits == (2,) and "it runs on another host, or has not begun" in found.sentence


SERVES = (StackFrame(str(MPIPS / "store/server/loop.py"), 3, "serve"), *USUAL["stack"])


def test_servers_are_not_blamed_while_they_serve() -> None:
    late = (OngoingWait("pushpull of key 'w'", 9, (), "train.py:41"),)
    idle: dict[str, Any] = {"size": 4, "stack": SERVES}
    others = [rank(2, role="server", **idle), rank(3, role="spare", **idle)]
    assert explain("1", [rank(0, waits=late, size=4), rank(1, size=4), *others]).culprits == (1,)
    every = explain("1", [rank(0, waits=late, size=4), rank(1, waits=late, size=4), *others])
    assert every.sentence.endswith(
        "All workers are in it, so what they wait for is under way, or rank 2 (server) will not answer."
    )
    stopped = [rank(0, waits=late, size=2), rank(1, role="server", state="T", size=2)]
    assert explain("1", stopped).culprits == (1,)


def test_a_server_in_the_users_optimizer_is_named() -> None:
    stack = (StackFrame("/home/u/lion.py", 10, "numbers"), *SERVES)
    found = explain("4711", waiting(role="server", step=-1, stack=stack, cpu=0.0))
    assert found.culprits == (2,) and found.sentence == BEGIN + (
        "rank 2 (server), which is in Python code outside mpips (lion.py:10, numbers), not stopped, 0 % CPU."
    )


@pytest.mark.parametrize(
    ("lanes", "said"),
    [
        (
            [(1 << 62, 51, "sum"), (1 << 63, 0, "push of 'a'"), (1 << 63 | 1, 0, "push of 'b'")],
            "push of 'a' or push of 'b' (its last calls in 2 stores)",
        ),
        ([(7, 1, "sum of 7"), (3, 51, "sum of 10")], "sum of 10 or sum of 7 (its last calls in 2 communicators)"),
        ([(7, 1, "sum"), (3, 51, "sum"), (9, 0, "")], "sum"),
        ([(1 << 63, 0, "push"), (3 << 62, 0, "sum of 'w'")], "sum of 'w'"),
        (
            [(number, number, str(number)) for number in (1, 2, 3, 4)],
            "4 or 3 or 2 or another (its last calls in 4 communicators)",
        ),
    ],
)
def test_last_calls_of_several_lanes_have_no_order(lanes: list[tuple[int, int, str]], said: str) -> None:
    assert rank(0, lanes=tuple(LastCall(*lane) for lane in lanes)).last_call == said


def test_the_step_is_that_of_the_ranks_that_are_named() -> None:
    ranks = [rank(0, waits=WAITS, size=4), rank(1, waits=WAITS, size=4), rank(2, step=411, size=4), rank(3, step=3)]
    assert "has been stuck for 83 s in step 411: ranks 0, 1" in explain("1", ranks).sentence


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({}, "ends: ranks 0, 2 have ended their programs, and wait in MPI's end for rank 1, which is in Python"),
        ({"ranks_on_host": 2}, "no rank waits for another"),
        ({"communicators": {}}, "no rank waits for another"),
        ({"moved": True}, "goes on"),
    ],
)
def test_ranks_that_have_left_wait_for_those_that_have_not(differs: dict[str, Any], said: str) -> None:
    known = {"moved": False, "ranks_on_host": 3, "communicators": {"7": {"ranks": "0,1,2", "place": 0}}, **differs}
    assert said in explain("1", [rank(1, **known)]).sentence


def test_a_rank_that_others_wait_for_may_have_ended_its_program() -> None:
    known = {"waits": WAITS, "ranks_on_host": 3, "communicators": {"7": {"ranks": "0,1,2", "place": 0}}}
    found = explain("4711", [rank(number, **known) for number in (0, 1)])
    assert (found.culprits, found.sentence) == ((2,), f"{BEGIN}rank 2, which has ended its program.")


def test_ranks_in_different_calls_that_wait_for_each_other_are_a_deadlock() -> None:
    other = (OngoingWait("barrier", 5, (0,), "train.py:50"),)
    found = explain(
        "1", [rank(0, waits=(OngoingWait("sum", 5, (1,), "train.py:9"),), size=2), rank(1, waits=other, size=2)]
    )
    assert "rank 0 waits in sum (train.py:9); rank 1 waits in barrier (train.py:50)" in found.sentence
    assert "a deadlock" in found.sentence and found.culprits == (0, 1)


def test_equal_calls_in_two_communicators_are_a_deadlock_too() -> None:
    wait, one, two = (OngoingWait("sum", 5, (), "train.py:9"),), LastCall(1, 8, "sum"), LastCall(2, 8, "sum")
    made = {"1": {"ranks": "0,1", "place": 0}, "2": {"ranks": "0,1", "place": 2}}
    ranks = [
        rank(0, waits=wait, lanes=(one._replace(number=9), two), size=2, communicators=made),
        rank(1, waits=wait, lanes=(one, two._replace(number=9)), size=2),
    ]
    assert (
        "a deadlock: rank 0 has begun call 9 of the first communicator of ranks 0, 1 (train.py:9), which rank 1 has "
        "not begun; rank 1 has begun call 9 of communicator 3 of ranks 0, 1 (train.py:9), which rank 0 has not begun. "
    ) in explain("1", ranks).sentence
    both = [ranks[0], rank(1, waits=wait, lanes=ranks[0].lanes, size=2)]
    assert "a deadlock" not in explain("1", both).sentence


def test_short_waits_are_no_standing() -> None:
    short = (OngoingWait("pushpull of key 'w'", 0.4, (2,), "train.py:41"),)
    assert explain("1", [rank(0, waits=short), rank(1), rank(2)]).kind == "runs"


def test_a_stopped_rank_is_said_before_others_wait() -> None:
    found = explain("1", [rank(0), rank(1, state="T"), rank(2)])
    assert "ranks): rank 1, which is stopped by a signal: `kill -CONT 101` lets it go on. No other" in found.sentence
    assert (found.kind, found.culprits) == ("stands", (1,))


def test_the_slow_rank_is_the_one_that_does_not_wait() -> None:
    ranks = [rank(0, waiting=0.45), rank(1, waiting=0.02), rank(2, waiting=0.5), rank(3, role="server", waiting=0.0)]
    found = explain("1", ranks)
    assert found.kind == "slow" and found.culprits == (1,)
    assert "rank 1 holds the others up: it waits 2 % of its time, they wait 45 to 50 %" in found.sentence


def test_who_misses_rounds_of_a_quorum_is_named() -> None:
    servers = [rank(number, role="server", quorum_rounds=10, missed={"1": 4, "2": 1}) for number in (3, 4)]
    found = explain("1", [*(rank(number, member=number) for number in range(3)), *servers]).sentence
    assert found.endswith("Of its rounds the quorum has closed 40 % without rank 1, 10 % without rank 2 in time.")


def test_ranks_that_compute_alike_are_not_slow() -> None:
    assert explain("1", [rank(0, waiting=0.4), rank(1, waiting=0.3), rank(2, waiting=0.35)]).kind == "runs"
    found = explain("1", [rank(number, moved=False) for number in range(3)])
    assert found.kind == "runs" and "none has called mpips just now" in found.sentence


def test_of_a_job_that_has_ended_the_silent_rank_is_to_blame() -> None:
    told = {"failed": "pushpull of key 'w': rank 1 is needed, and its process has ended."}
    found = explain("1", [rank(0, state="", end=told), rank(1, state=""), rank(2, state="Z", end=told)])
    assert found.kind == "ended" and found.culprits == (1,)
    assert "Rank 1 (worker) ended without a word, as by SIGKILL." in found.sentence
    assert "Ranks 0, 2 said: pushpull of key 'w': rank 1 is needed, and its process has ended." in found.sentence


def test_of_a_job_whose_program_has_raised_that_rank_is_to_blame() -> None:
    own = {"failed": "ValueError: bad batch 7 (train.py:28)", "own": True}
    found = explain("1", [rank(0, state=""), rank(1, state="", end=own), rank(2, state="")])
    assert found.culprits == (1,) and found.sentence.endswith(
        "has ended. Rank 1 said: ValueError: bad batch 7 (train.py:28). Ranks 0, 2 ended with the job."
    )


def test_ranks_that_ended_alike_are_one_sentence() -> None:
    found = explain("1", [rank(number, state="") for number in range(3)])
    assert "Ranks 0, 1, 2 (worker) ended without a word" in found.sentence


@pytest.mark.parametrize(
    ("host", "unreached", "said"),
    [
        ("there", {}, "for rank 2 on there, which is stopped by a signal"),
        (
            None,
            {"there": "no answer within 1.3 s"},
            "for rank 2, of which nothing is known: it runs on host there, which "
            "does not answer. Host there does not answer: no answer within 1.3 s.",
        ),
    ],
)
def test_the_host_of_the_late_rank_is_named(host: str | None, unreached: dict[str, str], said: str) -> None:
    ranks = waiting(rank(2, host=host, state="T")) if host else waiting()[:2]
    assert said in explain("1", ranks, None, unreached).sentence


def test_a_call_that_all_are_in_hangs_between_hosts() -> None:
    waits = (WAITS[0]._replace(late=()),)
    found = explain(
        "1", [rank(0, waits=waits, host="h0"), rank(1, waits=waits, host="h1"), rank(2, waits=waits, host="h1")]
    )
    assert found.sentence.endswith(
        "All ranks are in it, and live: the network between their hosts is cut or slow (h0, rank 0; h1, ranks 1, 2)."
    )
