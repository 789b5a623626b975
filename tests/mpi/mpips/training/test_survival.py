"""A fit that goes on by itself after the end of an epoch: the same bits as one that nothing has disturbed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from collectives import CollectiveError
from mpips.layout import Layout
from mpips.training import Callback, Checkpoint, EarlyStop, LearningRate, Trainer
from mpips.training.checkpoint import steps_in
from tests.mpi.mpips.training.support import SYNCHRONOUS, Line, data, on_workers
from tests.mpi.sizes import either_mpi

X, Y = data()
EPOCHS, BATCH = 3, 2


def give_up(kv: Any) -> None:
    """End the epoch, as a failure of this rank does."""
    raise kv.settings.epoch.end("a test", CollectiveError("provoked"))


class Fails(Line):
    """A model that gives up in its n-th batches, before the gradients go out."""

    def __init__(self, kv: Any, batches: tuple[int, ...]) -> None:
        super().__init__()
        self._kv, self._batches, self._count = kv, batches, 0

    def loss_and_gradients(self, x: Any, y: Any) -> float:
        self._count += 1
        if self._count in self._batches:
            give_up(self._kv)
        return super().loss_and_gradients(x, y)


class Curve(Callback):
    """The losses of the steps; gives up in one of its own calls, once each."""

    def __init__(self, kv: Any = None, step: int = -1, epoch: int = -1) -> None:
        self.losses: dict[int, str] = {}
        self.ends: list[int] = []
        self._kv, self._step, self._epoch = kv, step, epoch

    def on_step(self, fit: Any) -> None:
        self.losses[fit.step] = fit.last_loss.hex()
        if fit.step == self._step:
            self._step = -1
            give_up(self._kv)

    def on_epoch(self, fit: Any, epoch: Any) -> None:
        self.ends.append(epoch.epoch)
        if epoch.epoch == self._epoch:
            self._epoch = -1
            give_up(self._kv)


@pytest.fixture
def survives(monkeypatch):
    monkeypatch.setattr(Layout, "survives", True)


def trained(kv: Any, model: Line, curve: Curve, folder: Any, optimizer: str = "sgd", **options: Any) -> list[str]:
    """A fit with all that there is; what must be equal in the end."""
    trainer = Trainer(model, kv, optimizer, learning_rate=0.05, **options)
    callbacks = [curve, EarlyStop("test_loss", patience=99), LearningRate(lambda epoch: 0.1 / epoch),
                 Checkpoint(folder, every=3, keep=None)]  # fmt: skip
    history = trainer.fit(X, Y, batch_size=BATCH, epochs=EPOCHS, seed=3, test=(X, Y), callbacks=callbacks)
    early = callbacks[1]
    words = [f"{epoch.epoch} {epoch.loss.hex()} {epoch.test['loss'].hex()}" for epoch in history]
    return [*words, repr(early.state()), model.bits().hex(), repr(sorted(curve.losses.items()))]


WAYS: list[dict[str, Any]] = [
    {"batches": (1, 5, 9)}, {"batches": (2, 2 + 50 // BATCH)}, {"step": 4}, {"epoch": 1}, {"epoch": EPOCHS},
]  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9}, "adam": {"optimizer": "adam"}, "clipped": {"optimizer": "adam", "clip_norm": 0.5},
    "accumulated": {"momentum": 0.9, "accumulate": 2},
}  # fmt: skip


@either_mpi
@pytest.mark.parametrize("what", OPTIONS)
@pytest.mark.parametrize("kind", SYNCHRONOUS)
def test_a_fit_goes_on_with_the_same_bits(kind, what, survives, mpi_tmp_path):
    ended: list[list[str]] = []
    draw = random.Random(f"{kind} {what}")

    def work(kv, way, place):
        failing = kv.rank == draw.randrange(kv.num_workers)
        model = Fails(kv, way.get("batches", ())) if failing else Line()
        curve = Curve(kv, way.get("step", -1), way.get("epoch", -1)) if failing else Curve()
        ended.append(trained(kv, model, curve, place, **OPTIONS[what]))
        assert kv.epoch == (len(way.get("batches", "1")) if way else 0)

    for number, way in enumerate([{}, *WAYS]):
        on_workers(kind, lambda kv, way=way, number=number: work(kv, way, mpi_tmp_path / str(number)))
    for way, one in zip(WAYS, ended[1:]):
        assert one == ended[0], way
    whole = [path.name for path in steps_in(mpi_tmp_path / "0")]
    assert all([path.name for path in steps_in(mpi_tmp_path / str(n))] == whole for n in range(1, len(WAYS) + 1))
