"""A fit that goes on by itself after deaths: the same bits as one that nothing has disturbed.

    python -m tests.mpi.mpips.training.test_survival MODE KIND WHAT PLACE [DEATHS]

is a rank of a job. MODE "ends": one store, and several Trainers; epochs end though nobody dies. "dies": a fit in which
ranks are killed. "grows": the same, and spares become workers. "resumes": a fit from a checkpoint. WHAT is one of
OPTIONS, PLACE a path that results begin with. DEATHS says which ranks of the job die when: "0:b5,3:t0.1" is rank 0 in
its fifth batch, and rank 3 after 0.1 s: the last epoch waits for it. Of "resumes" it is the checkpoint.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import mpips
from collectives import CollectiveError
from mpips.training import Callback, Checkpoint, EarlyStop, Elastic, LearningRate, Local, Trainer
from tests import child
from tests.choice import first
from tests.mpi.deaths import die, die_later, wait_until_dead
from tests.mpi.mpips.training.support import Line, data, uneven
from tests.mpi.sizes import JOB_LIMIT, only_on
from tests.run import OTHER_MPI

MODULE = "tests.mpi.mpips.training.test_survival"
ROOT = Path(__file__).resolve().parents[4]
X, Y = data()
EPOCHS, BATCH = 3, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adam": {"optimizer": "adam"},
    "clipped": {"optimizer": "adam", "clip_norm": 0.5},
    "accumulated": {"momentum": 0.9, "accumulate": 2},
    "uneven": {"momentum": 0.9},
    "elastic": {"elastic": Elastic(alpha=0.3, interval=2)},
    "local": {"local": Local(3, "average")},
    "quorum": {"local": Local(3, "average")},
    "mirrored": {"local": Local(3, "average")},
}
STORES: dict[str, dict[str, Any]] = {
    "quorum": {"quorum": 2, "grace_seconds": 0.05},
    "mirrored": {"quorum": 2, "grace_seconds": 0.05, "mirrors": 1, "shared_memory": False, "timeout_seconds": 30},
}
"""Options of the store."""
ENDS: list[dict[str, Any]] = [{}, {"batches": (1, 5, 9)}, {"step": 4}, {"epoch": 1}, {"epoch": EPOCHS}]
"""How epochs end: in these batches of one worker, in a callback after a step, or after an epoch."""
survivors = pytest.mark.skipif(OTHER_MPI in os.environ, reason="Open MPI alone tells of deaths")


class Curve(Callback):
    """The losses of the steps; it does something in one of its own calls, once each.

    The last epoch begins when the ranks `dying` have died: a death at a time comes before the end, however fast the fit
    is.
    """

    def __init__(
        self, do: Any = None, step: int = -1, epoch: int = -1, begun: Path | None = None, dying: Sequence[int] = ()
    ) -> None:
        self.losses: dict[int, str] = {}
        self._begun, self._dying = begun, dying
        self._do, self._step, self._epoch = do, step, epoch

    def on_begin(self, fit: Any) -> None:
        if self._begun is not None:
            self._begun.touch()

    def on_step(self, fit: Any) -> None:
        self.losses[fit.step] = fit.last_loss.hex()
        if fit.step == self._step:
            self._step = -1
            self._do()

    def on_epoch(self, fit: Any, epoch: Any) -> None:
        if epoch.epoch == EPOCHS - 1:
            wait_until_dead(self._dying)
        if epoch.epoch == self._epoch:
            self._epoch = -1
            self._do()


class Acts(Line):
    """A model that does something in its n-th batches, before the gradients go out."""

    def __init__(self, do: Any, batches: tuple[int, ...]) -> None:
        super().__init__()
        self._do, self._batches, self._count = do, batches, 0

    def loss_and_gradients(self, x: Any, y: Any) -> float:
        self._count += 1
        if self._count in self._batches:
            self._do()
        return super().loss_and_gradients(x, y)

    def loss(self, x: Any, y: Any) -> float:
        """Of the test data, which are no batch."""
        return super().loss_and_gradients(x, y)


def trained(
    kv: Any, model: Line, curve: Curve, what: str, folder: str, resume: Any = None, grow: bool = False
) -> dict[str, Any]:
    """A fit with all that there is; what must be equal in the end."""
    trainer = Trainer(model, kv, grow=grow, **{"optimizer": "sgd", "learning_rate": 0.05, **OPTIONS[what]})
    early, rate = EarlyStop("test_loss", patience=99), LearningRate(lambda epoch: 0.1 / epoch)
    saving = [] if kv.layout.asynchronous else [Checkpoint(folder, every=1, keep=None)]
    batches = (lambda epoch: uneven(kv.rank, epoch),) if what == "uneven" else (X, Y)
    history = trainer.fit(
        *batches,
        batch_size=None if what == "uneven" else BATCH,
        epochs=EPOCHS,
        seed=3,
        test=(X, Y),
        callbacks=[curve, early, rate, *saving],
        resume=resume,
    )
    return {
        "history": [f"{epoch.epoch} {epoch.loss.hex()} {epoch.test['loss'].hex()}" for epoch in history],
        "early": repr(early.state()),
        "bits": model.bits().hex(),
        "losses": curve.losses,
    }


# ---- ranks of a job


def ends(kv: Any, place: str) -> None:
    """Fits in which epochs end, each beside one in which none does."""

    def give_up() -> None:
        raise kv.worker.generation.end("a test", CollectiveError("provoked"))

    for what in ("sgd", "adam", "clipped", "accumulated"):
        found = []
        for number, way in enumerate(ENDS):
            before, failing = kv.generation, kv.rank == number % kv.num_workers
            model = Acts(give_up, way.get("batches", ())) if failing else Line()
            curve = Curve(give_up, way.get("step", -1), way.get("epoch", -1)) if failing else Curve()
            found.append(trained(kv, model, curve, what, f"{place}-{what}{number}"))
            assert kv.generation - before == (len(way.get("batches", "1")) if way else 0), (what, way)
            assert found[-1] == found[0], (what, way)


def dies(kv: Any, what: str, place: str, when: str, dying: Sequence[int], grow: bool = False) -> None:
    """A fit in which this rank may be killed; what came out, in a file for each worker."""
    number = int(when[1:]) if when[:1] in tuple("bse") else -1
    step, epoch = (number if when[:1] == letter else -1 for letter in "se")
    curve = Curve(die, step, epoch, Path(f"{place}.begun"), dying)
    model = Acts(die, (number,) if when[:1] == "b" else ())
    found = trained(kv, model, curve, what, f"{place}-kept", grow=grow)
    Path(f"{place}.{kv.rank}").write_text(json.dumps({**found, "workers": kv.num_workers, "epoch": kv.generation}))


def program(mode: str, kind: str, what: str, place: str, deaths: str = "") -> None:
    """One rank."""
    words = deaths.split(",") if mode in ("dies", "grows") and deaths else []
    deaths_of = dict(word.split(":") for word in words)
    dying = [int(rank) for rank, when in deaths_of.items() if when[:1] == "t"]
    when = deaths_of.get(str(MPI.COMM_WORLD.rank), "")
    if when[:1] == "t":
        die_later(Path(f"{place}.begun"), float(when[1:]))
    kv = mpips.create(kind, **STORES.get(what, {}))
    if mode == "ends":
        ends(kv, place)
    elif mode in ("dies", "grows"):
        dies(kv, what, place, when, dying, mode == "grows")
    else:
        found = trained(kv, Line(9), Curve(), what, f"{place}-more", resume=deaths)
        Path(f"{place}.{kv.rank}").write_text(json.dumps(found))
    kv.close()


# ---- jobs


def job(roles: str, *words: str) -> None:
    """A job of `mpips run` that ends well."""
    argv = [sys.executable, "-m", "launch.cli", "run", *roles.split(), "-m", MODULE, *words]
    said = BytesIO()
    code = child.run(argv, JOB_LIMIT, ROOT, said)
    assert code == 0, said.getvalue().decode(errors="replace")[-3000:]


def results(place: Path) -> list[dict[str, Any]]:
    """What the workers of a job have written, by rank."""
    paths = sorted(place.parent.glob(f"{place.name}.[0-9]"))
    return [json.loads(path.read_text()) for path in paths]


def see_equal(found: list[dict[str, Any]], whole: list[dict[str, Any]]) -> None:
    """All workers have what they would have without a death; a spare has the losses of its own steps."""
    assert len(found) == len(whole)
    for mine, theirs in zip(found, whole):
        assert {name: mine[name] for name in ("history", "early", "bits")} == {
            name: theirs[name] for name in ("history", "early", "bits")
        }
        assert mine["losses"].items() <= theirs["losses"].items()
        assert str(max(map(int, theirs["losses"]))) in mine["losses"]


@only_on(1)
@survivors
@pytest.mark.full
@first(1, **{"roles, kind": [("-s 1 -w 4 -c 2", "mpi_sync"), ("-s 1 -w 3", "dist_sync"), ("-w 3", "mpi_sync")]})
def test_a_fit_goes_on_after_an_epoch_in_which_nobody_died(roles, kind, tmp_path):
    job(f"{roles} --spares 0", "ends", kind, "all", str(tmp_path / "a"))


@pytest.mark.core(1)
@only_on(1)
@survivors
@first(
    2,
    **{
        "roles, kind, what, deaths": [
            ("-s 1 -w 3", "dist_sync", "adam", "3:t0.1,1:b7"),
            ("-w 3", "mpi_sync", "clipped", "0:s4,2:e2"),
            ("-w 3", "mpi_sync", "sgd", "1:b5,0:s9"),
            ("-s 1 -w 3", "dist_sync", "uneven", "2:b5,0:e1"),
            ("-s 2 -w 2", "dist_sync", "accumulated", "3:t0.05,0:e1"),
            ("-s 1 -w 4 -c 2", "mpi_sync", "adam", "0:b9,4:t0.1"),
        ]
    },
)
def test_spares_take_the_places_of_the_dead_with_the_same_bits(roles, kind, what, deaths, tmp_path):
    for name, when in (("whole", ""), ("killed", deaths)):
        job(f"{roles} --spares 2", "dies", kind, what, str(tmp_path / name), when)
    found = results(tmp_path / "killed")
    see_equal(found, results(tmp_path / "whole"))
    assert all(one["epoch"] for one in found)


@pytest.mark.core(1)
@only_on(1)
@survivors
@first(
    1,
    **{
        "roles, kind, what, step": [
            ("-s 1", "dist_sync", "adam", 9),
            ("-s 0", "mpi_sync", "sgd", 4),
            ("-s 0", "mpi_sync", "clipped", 10),
            ("-s 1", "dist_sync", "accumulated", 3),
        ]
    },
)
def test_fewer_workers_go_on_as_a_job_of_so_many_from_that_step(roles, kind, what, step, tmp_path):
    """The last worker dies in the batch after a step; two others resume from a checkpoint of that step."""
    batch = step * OPTIONS[what].get("accumulate", 1) + 1
    job(f"{roles} -w 3 --spares 0", "dies", kind, what, str(tmp_path / "killed"), f"2:b{batch}")
    checkpoint = tmp_path / "killed-kept" / f"step-{step:08d}.trainer.safetensors"
    job(f"{roles} -w 2", "resumes", kind, what, str(tmp_path / "resumed"), str(checkpoint))
    found, resumed = results(tmp_path / "killed"), results(tmp_path / "resumed")
    assert [one["workers"] for one in found] == [2, 2]
    see_equal(resumed, found)


@pytest.mark.slow
@only_on(1)
@survivors
@first(
    1,
    **{
        "roles, kind, what, deaths": [
            ("-s 1 -w 3 --spares 1", "dist_async", "sgd", "1:b5"),
            ("-s 1 -w 3 --spares 0", "dist_async", "elastic", "1:b7"),
            ("-s 1 -w 4 -c 2 --spares 2", "mpi_async", "elastic", "2:b9,4:t0.1"),
        ]
    },
)
def test_asynchronous_workers_go_on(roles, kind, what, deaths, tmp_path):
    job(roles, "dies", kind, what, str(tmp_path / "killed"), deaths)
    found = results(tmp_path / "killed")
    assert len(found) == found[0]["workers"] and all(len(one["history"]) == EPOCHS for one in found)


@pytest.mark.core(1)
@only_on(1)
@survivors
@first(
    4,
    **{
        "roles, kind, what, deaths, same": [
            ("-s 1 -w 3 --spares 1", "dist_async", "quorum", "1:b5", False),  # a spare takes its place
            ("-s 2 -w 3 --spares 1", "dist_async", "quorum", "3:t0.05,0:b9", False),  # a server, and a worker
            ("-s 2 -w 3 --spares 1", "dist_async", "mirrored", "4:t0.05", False),  # a server with its host
            ("-s 2 -w 2 --spares 1", "dist_sync", "local", "3:t0.1", True),
            ("-s 1 -w 3 --spares 0", "dist_async", "quorum", "1:b4,2:b9", False),  # fewer are left than the quorum
            ("-s 2 -w 3 --spares 2", "dist_async", "mirrored", "3:t0.02,1:b7", False),
            ("-s 1 -w 3 --spares 1", "dist_sync", "local", "1:b5", False),
            ("-w 3 --spares 0", "dist_sync", "local", "2:b8", False),
            ("-s 1 -w 3 --spares 1", "dist_async", "local", "0:b7", False),
        ]
    },
)
def test_workers_that_train_apart_go_on(roles, kind, what, deaths, same, tmp_path):
    """A dead server changes no bit in a synchronous store. A dead worker's changes since the last exchange are lost."""
    for name, when in (("whole", ""), ("killed", deaths)):
        job(roles, "dies", kind, what, str(tmp_path / name), when)
    found, whole = results(tmp_path / "killed"), results(tmp_path / "whole")
    assert len(found) == found[0]["workers"] and all(one["epoch"] for one in found)
    if same:
        see_equal(found, whole)
    assert all(len(one["history"]) == EPOCHS for one in found)
    # What asynchronous workers have in common at the end depends on the machine. But all have learned.
    losses = [[float.fromhex(epoch.split()[2]) for epoch in one["history"]] for one in found]
    assert all(each[-1] < each[0] / 2 for each in losses), losses


@pytest.mark.slow
@only_on(1)
@survivors
@first(
    1,
    **{
        "roles, kind, what": [
            ("-s 1", "dist_sync", "adam"),
            ("-s 0", "mpi_sync", "sgd"),
            ("-s 0", "mpi_sync", "clipped"),
            ("-s 1", "mpi_sync", "accumulated"),
        ]
    },
)
def test_spares_join_as_a_job_of_so_many_from_the_second_epoch_on(roles, kind, what, tmp_path):
    job(f"{roles} -w 2 --spares 1", "grows", kind, what, str(tmp_path / "grown"))
    per_epoch = -(-len(X) // (2 * BATCH) // OPTIONS[what].get("accumulate", 1))
    checkpoint = tmp_path / "grown-kept" / f"step-{per_epoch:08d}.trainer.safetensors"
    job(f"{roles} -w 3", "resumes", kind, what, str(tmp_path / "resumed"), str(checkpoint))
    found, resumed = results(tmp_path / "grown"), results(tmp_path / "resumed")
    assert [one["workers"] for one in found] == [3, 3, 3]
    see_equal(resumed, found)


@only_on(1)
@survivors
@pytest.mark.full
@pytest.mark.parametrize(
    "roles, kind, what, deaths, left",
    [
        ("-s 1 -w 3 --spares 2", "dist_sync", "uneven", "0:e2", 4),
        ("-s 1 -w 2 --spares 2", "dist_sync", "adam", "1:b3", 3),
        ("-s 2 -w 2 --spares 2", "mpi_sync", "clipped", "4:b3,2:e2", 3),
        ("-s 1 -w 2 --spares 2", "dist_async", "sgd", "0:e2", 3),
        ("-s 1 -w 2 --spares 1", "dist_async", "elastic", "", 3),
        ("-s 1 -w 4 -c 2 --spares 2", "mpi_async", "elastic", "1:e2", 5),
        ("-s 1 -w 4 -c 2 --spares 2", "mpi_async", "sgd", "", 6),
    ],
)
def test_spares_join_before_or_after_a_death(roles, kind, what, deaths, left, tmp_path):
    job(roles, "grows", kind, what, str(tmp_path / "killed"), deaths)
    found = results(tmp_path / "killed")
    assert [one["workers"] for one in found] == [left] * left
    assert all(len(one["history"]) == EPOCHS for one in found)
    assert kind.endswith("async") or len({one["bits"] for one in found}) == 1


if __name__ == "__main__":
    program(*sys.argv[1:])
