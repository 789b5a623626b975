"""`mpips run --restarts` for real: ranks are killed, the disk is full, the program fails; the training's bits stay."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from mpi4py import MPI

from launch import find
from launch.mpirun import find_obstacle_to_survival
from mpips.store.checkpoint import folder as files
from tests.choice import first
from tests.mpi.launch.restart_table import Run, run

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")
HINDRANCE = find_obstacle_to_survival(find()) if MPI.COMM_WORLD.size == 1 else ""

TRAIN = "from tests.mpi.launch.restart_table import training\ntraining({folder!r}, {kind!r}, {steps}, 0.01)\n"
IN_SAVE = """
import os, signal, threading, time
from pathlib import Path
from mpips.store.world import launched_as

def killer():
    while not list(saved.glob('*.part')):
        time.sleep(0.0005)
    with open(mark, 'a') as file:
        file.write('x')
    os.kill(os.getpid(), signal.SIGKILL)

def replaced(path, to):  # the file is not whole before the job has ended
    while kills < 2 and str(path).startswith(str(saved)):
        time.sleep(1)
    replace(path, to)

saved, mark = Path({saved!r}), Path({folder!r}, 'killed')
kills = mark.stat().st_size if mark.exists() else 0
replace, os.replace = os.replace, replaced
if launched_as(os.environ)[0] == (0, 4)[kills % 2] and kills < 2:
    threading.Thread(target=killer, daemon=True).start()
"""
RAISES = """
import mpips
kv = mpips.create('dist_sync')
if kv.rank == 1:
    raise ZeroDivisionError('one bad step')
kv.barrier()
"""


COMPRESSED = """
import os, signal
from pathlib import Path
import mpips
create = mpips.create

def created(kind):
    kv = create(kind)
    kv.set_gradient_compression({{"type": "2bit", "threshold": 0.25}})
    push, mark = kv.pushpull, Path({folder!r}, "killed")

    def pushpull(*words, **more):
        push(*words, **more)
        if kv.rank == 1 and not mark.exists() and list(Path({saved!r}).glob("store-0000004*.safetensors")):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    kv.pushpull = pushpull
    return kv

mpips.create = created
"""

DIES_LATER = """
import os, signal, threading, time
from pathlib import Path
import mpips
from mpips.store.world import launched_as
from tests.mpi.deaths import wait_until_dead

def steps():
    return losses.read_bytes().count(b'\\n') if losses.exists() else 0

def killer():
    while steps() < coming[rank]:
        time.sleep(0.0005)
    mark(rank).touch()
    os.kill(os.getpid(), signal.SIGKILL)

def created(kind):
    kv = create(kind)
    push = kv.pushpull

    def pushpull(*words, **more):  # no death comes later than so
        wait_until_dead(victim for victim, step in coming.items() if steps() > step + LATEST)
        push(*words, **more)

    kv.pushpull = pushpull
    return kv

def mark(rank):
    return Path({folder!r}, f'killed{{rank}}')

LATEST = 9
rank, losses = launched_as(os.environ)[0], Path({folder!r}, 'losses')
coming = {{victim: step for victim, step in {deaths!r}.items() if not mark(victim).exists()}}
create, mpips.create = mpips.create, created
if rank in coming:
    threading.Thread(target=killer, daemon=True).start()
"""


def words(folder: Path, restarts: int) -> list[str]:
    return ["--restarts", str(restarts), "--checkpoint", str(folder / "saved"), "--every", "5"]


def with_script(
    tmp_path: Path,
    before: str,
    restarts: int,
    steps: int = 60,
    train: str = TRAIN,
    deaths: dict[int, int] | None = None,
    more: tuple[str, ...] = (),
    **roles: int,
) -> Run:
    """The training with lines before it, or another program. `deaths`: ranks, and after which step each dies once."""
    folder, script = tmp_path / "killed", tmp_path / "script.py"
    names = {
        "folder": str(folder),
        "saved": str(tmp_path / "saved"),
        "kind": "dist_sync",
        "steps": steps,
        "deaths": deaths,
    }
    script.write_text(before.format(**names) + train.format(**names))
    return run(folder, [*words(tmp_path, restarts), *more], program=[str(script)], **roles)


def again(done: Run) -> list[int]:
    """The steps from which the job started again; its beginning is step 0."""
    found = re.findall(
        r"^mpips: rank \d+ \(.*\) .*: the job starts again from (?:step (\d+)|its beginning), restart",
        done.said,
        re.MULTILINE,
    )
    return [int(step or 0) for step in found]


@first(1, **{"kind, servers, kills": [("dist_sync", 2, 1), ("mpi_sync", 0, 1), ("dist_sync", 1, 3)]})
def test_a_killed_training_comes_to_the_same_bits(tmp_path: Path, kind: str, servers: int, kills: int) -> None:
    roles = {"kind": kind, "servers": servers, "steps": 80}
    plain = run(tmp_path / "plain", [], **roles)
    assert plain.code == 0, plain.said
    done = run(tmp_path / "killed", words(tmp_path, 9), kills=kills, seed=3, pause=0.01, **roles)
    assert done.code == 0, done.said
    assert done.kills == kills and len(again(done)) == kills
    assert done.losses == plain.losses and len(plain.losses) == 80
    assert len(list((tmp_path / "saved").iterdir())) == 2


@pytest.mark.full
def test_an_asynchronous_training_goes_on_too(tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    done = run(folder, words(tmp_path, 9), kind="dist_async", servers=1, workers=1, steps=80, kills=2, pause=0.01)
    assert done.code == 0, done.said
    assert done.losses == run(tmp_path / "plain", [], kind="dist_async", servers=1, workers=1, steps=80).losses


@pytest.mark.full
def test_what_compression_kept_back_and_a_changed_learning_rate_come_back(tmp_path: Path) -> None:
    done = with_script(tmp_path, COMPRESSED, 2, steps=80)
    assert done.code == 0, done.said
    assert [step // 10 for step in again(done)] == [4]
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "killed").mkdir()
    (plain / "killed" / "killed").touch()
    assert done.losses == with_script(plain, COMPRESSED, 0, steps=80).losses


@pytest.mark.slow
def test_a_kill_while_it_saves_leaves_what_was_saved_before(tmp_path: Path) -> None:
    done = with_script(tmp_path, IN_SAVE, 4)
    assert done.code == 0, done.said
    assert again(done) == [0, 0]  # once worker 0, once a server, before the first save was whole
    assert done.losses == run(tmp_path / "plain", [], steps=60).losses


@pytest.mark.slow
def test_on_a_full_disk_the_training_goes_on_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path / "saved")]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no small file system can be mounted here")
    try:
        done = with_script(tmp_path, "", 2)
        left = list((tmp_path / "saved").iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path / "saved")], check=True)
    assert done.code == 0, done.said
    assert "cannot be written: No space left on device" in done.said
    assert len(done.losses) == 60
    assert left == []


def test_a_program_that_raises_is_not_started_again(tmp_path: Path) -> None:
    done = with_script(tmp_path, "", 5, train=RAISES)
    assert done.code == 1
    assert done.said.count("ZeroDivisionError: one bad step") == 1
    assert "again" not in done.said


@pytest.mark.slow
@pytest.mark.skipif(bool(HINDRANCE), reason=HINDRANCE)
@first(
    1,
    **{
        "servers, spares, deaths, starts": [
            (1, 1, {3: 12, 4: 27, 0: 45}, 1),  # the server; the spare in its place, so that none is left; then worker 0
            (0, 2, {1: 12, 0: 27}, 0),
        ]
    },
)
def test_who_is_left_goes_on_and_what_cannot_go_on_starts_again(
    tmp_path: Path, servers: int, spares: int, deaths: dict[int, int], starts: int
) -> None:
    more = ("--spares", str(spares))
    done = with_script(tmp_path, DIES_LATER, 2, deaths=deaths, more=more, servers=servers)
    assert done.code == 0, done.said
    assert len(list((tmp_path / "killed").glob("killed*"))) == len(deaths), done.said
    assert len(again(done)) == starts, done.said
    assert done.said.count("; the others go on") >= len(deaths) - starts
    assert done.losses == run(tmp_path / "plain", [], steps=60, servers=servers).losses and len(done.losses) == 60
    assert max(files.steps_in(str(tmp_path / "saved"))) > max(deaths.values())  # it saves itself after a recovery, too
