"""The parts of a Trainer that need no other rank."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.mlp import MLP
from mpips.training import Callback, Checkpoint, EarlyStop, Elastic, Epoch, LearningRate
from mpips.training import callbacks as hooks
from mpips.training.batches import shares, source_of
from mpips.training.checkpoint import STORE, TRAINER, Position, check_folder, decode, prune, steps_in
from mpips.training.evaluation import means, measured
from mpips.training.model import check_model_arrays, keys_of
from mpips.training.step import Accumulated
from mpips.training.updates import clip, global_norm


def workers(number):
    return [SimpleNamespace(rank=rank, num_workers=number) for rank in range(number)]


# ---- batches


@given(number=st.integers(1, 7), batch=st.integers(1, 9), spare=st.integers(0, 40), epoch=st.integers(1, 9))
def test_workers_share_each_mini_batch_of_the_serial_run(number, batch, spare, epoch):
    samples = number * batch + spare
    serial = list(shares(samples, number * batch, epoch, 0, workers(1)[0]))
    split = [list(shares(samples, batch, epoch, 0, worker)) for worker in workers(number)]
    assert all(len(part) == len(serial) for part in split)
    for step, rows in enumerate(serial):
        np.testing.assert_array_equal(np.concatenate([part[step] for part in split]), rows)
    together = np.concatenate(serial)
    assert len(set(together.tolist())) == len(together) == samples - samples % (number * batch)


def test_epochs_and_seeds_give_other_orders():
    one = workers(1)[0]
    orders = [next(shares(50, 50, epoch, seed, one)).tolist() for epoch in (1, 2) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


X, Y = np.arange(36.0).reshape(9, 4), np.arange(9.0)
PAIRS = [(X[:3], Y[:3]), (X[3:5], Y[3:5])]


@pytest.mark.parametrize(
    "given_, words",
    [
        ({"y": Y[:7]}, "x and y: 9 inputs, but 7 targets"),
        ({"y": 9}, "x and y: give two arrays.*not int"),
        ({"batch_size": 0}, "batch_size=0: give at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0: give a whole number"),
        ({"batch_size": None}, "give batch_size"),
        ({"y": None}, r"x is an array \(9, 4\) without y"),
        ({"x": PAIRS, "y": None}, "batch_size=3 goes with arrays"),
        ({"x": 3, "y": None, "batch_size": None}, "an iterable of batches.*not a int"),
    ],
)
def test_what_is_no_source_of_batches_is_said(given_, words):
    with pytest.raises((TypeError, ValueError), match=words):
        source_of(**{"x": X, "y": Y, "batch_size": 3, "seed": 0, **given_})


# ---- gradients


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
def test_clipping_keeps_the_direction_and_bounds_the_norm(dtype):
    rng = np.random.default_rng(0)
    before = [rng.normal(size=shape).astype(dtype) for shape in [(40, 3), (7,)]]
    gradients = [one.copy() for one in before]
    norm = clip(gradients, 2.0)
    flat = np.concatenate([one.reshape(-1).astype(np.float64) for one in before])
    assert norm == pytest.approx(np.linalg.norm(flat))
    assert global_norm(gradients) == pytest.approx(2.0, rel=1e-2)
    assert [one.dtype for one in gradients] == [one.dtype for one in before]
    ratio = (before[0] * 1.0 / norm * 2).astype(np.float64)
    np.testing.assert_allclose(gradients[0].astype(np.float64), ratio, rtol=5e-2)


def test_what_is_within_the_limit_or_not_finite_is_left_alone():
    small, broken = [np.ones(3)], [np.array([np.inf, 1.0])]
    assert clip(small, 2.0) == pytest.approx(math.sqrt(3)) and small[0].tolist() == [1, 1, 1]
    assert clip(broken, 2.0) == math.inf and broken[0].tolist() == [np.inf, 1]


def test_a_norm_is_added_in_float64():
    assert global_norm([np.full(100_000, 1e25, np.float32)]) == pytest.approx(1e25 * math.sqrt(100_000))


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", ml_dtypes.bfloat16])
def test_accumulated_batches_have_the_mean_over_all_samples(dtype):
    gradient = np.zeros(3, dtype)
    total = Accumulated([gradient])
    for value, samples in ((1, 2), (4, 1)):
        gradient[...] = value
        total.add(samples)
    total.mean()
    np.testing.assert_array_equal(gradient, np.full(3, 2, dtype))
    gradient[...] = math.nan
    total.add(0)  # the mean of no sample
    gradient[...] = 2
    total.mean()  # nothing was added: nothing changes
    np.testing.assert_array_equal(gradient, np.full(3, 2, dtype))


@pytest.mark.parametrize("options", [{"interval": 0}, {"alpha": 0.0}, {"alpha": float("nan")}])
def test_elastic_options_are_checked(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        Elastic(**options)


# ---- models

W = np.zeros((2, 3))


@pytest.mark.parametrize(
    "model, words",
    [
        (object(), "object has no parameters, gradients, loss_and_gradients"),
        (SimpleNamespace(parameters=[W], gradients=[], loss_and_gradients=print), "1 parameters, but 0 gradients"),
        (SimpleNamespace(parameters=[W], gradients=[W.T], loss_and_gradients=print), r"gradients\[0\] float64\(3, 2\)"),
    ],
)
def test_what_a_model_lacks_is_said(model, words):
    with pytest.raises((TypeError, ValueError), match=words):
        check_model_arrays(model)


def test_keys_are_the_names_of_a_model_or_numbers():
    assert keys_of(SimpleNamespace(parameters=[W, W])) == ["0", "1"]
    assert keys_of(MLP((4, 1))) == ["layer0.weight", "layer0.bias"]


@pytest.mark.parametrize("x, y", [(X[:, :3], Y), (X, Y[:5]), (X[0], Y)])
def test_a_network_says_what_it_takes(x, y):
    with pytest.raises(ValueError, match=r"this network takes x \(samples, 4\)"):
        MLP((4, 1), dtype="float64").loss_and_gradients(x, y)


# ---- evaluation


class Line:
    """Predicts x, and loses |x - y|."""

    def predict(self, x):
        return x

    def loss(self, x, y):
        return float(np.abs(x - y).mean())


def test_a_metric_of_another_length_is_said():
    job = SimpleNamespace(model=Line(), metrics={"far": lambda outputs, y: outputs[1:]})
    with pytest.raises(ValueError, match=r"metrics\['far'\] gave an array \(2,\) for 3 samples"):
        measured(job, [(Y[:3], Y[:3])])
    with pytest.raises(ValueError, match="no worker has a sample"):
        means([measured(job, [])])


# ---- positions, files


def test_a_position_comes_back_with_the_same_bits():
    position = Position(3, 4, 25, 1.25, 0.1 + 0.2, 1 / 3, True, "order", callbacks={"EarlyStop 0": [0.1, 2]})
    position.history += [Epoch(1, 0.5, math.nan, {"loss": 1 / 3}), Epoch(2, 0.7, math.inf)]
    back = decode(json.loads(position.encode()))
    assert repr(back) == repr(position)
    with pytest.raises(ValueError, match="not as a Trainer writes it"):
        decode({"epoch": "three"})


def test_an_epoch_is_asked_by_what_is_monitored():
    epoch = Epoch(1, 0.5, 2.0, {"loss": 3.0, "accuracy": 0.5})
    assert (epoch.value("loss"), epoch.value("test_loss"), epoch.accuracy) == (2.0, 3.0, 0.5)
    assert Epoch(1, 0.5, 2.0).accuracy is None


def test_only_the_newest_checkpoints_stay_and_halves_are_none(tmp_path):
    for step in (2, 10, 9, 100_000_000):
        for ending in (STORE, TRAINER):
            (tmp_path / f"step-{step:08d}{ending}").touch()
    (tmp_path / f"step-{11:08d}{STORE}").touch()  # was killed before it was whole
    assert [path.name for path in steps_in(tmp_path)] == [f"step-{step:08d}" for step in (2, 9, 10, 100_000_000)]
    prune(str(tmp_path), 2)
    assert [path.name for path in steps_in(tmp_path)] == ["step-00000010", "step-100000000"]


def test_a_folder_that_cannot_take_a_checkpoint_is_found_before(tmp_path, monkeypatch):
    check_folder(tmp_path / "a" / "b", 3)
    assert list((tmp_path / "a" / "b").iterdir()) == []
    for ending in (STORE, TRAINER):
        (tmp_path / f"step-{4:08d}{ending}").touch()
    check_folder(tmp_path, 4)
    with pytest.raises(ValueError, match="has a checkpoint of step 4, and this one is of step 3"):
        check_folder(tmp_path, 3)

    def refuses(**words):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuses)
    with pytest.raises(ValueError, match=r"nothing can be written to the folder .*: Read-only file system"):
        check_folder(tmp_path, 4)


def test_halves_older_than_the_newest_checkpoint_go_with_the_old_ones(tmp_path):
    for step in (2, 5):
        for ending in (STORE, TRAINER):
            (tmp_path / f"step-{step:08d}{ending}").touch()
    for name in (f"step-{1:08d}{STORE}", f"step-{3:08d}{STORE}", f"step-{6:08d}{STORE}", f"step-x{STORE}"):
        (tmp_path / name).touch()
    prune(str(tmp_path), 2)
    stores = {path.name.removesuffix(STORE) for path in tmp_path.glob("*" + STORE)}
    assert stores == {"step-00000002", "step-00000005", "step-00000006", "step-x"}


# ---- callbacks


def fitting(**words):
    told = {"mean": lambda value: value, "measures": ("loss", "test_loss", "test_accuracy"), "epoch": 1, "epochs": 9}
    return SimpleNamespace(**{**told, **words})


@pytest.mark.parametrize(
    "stop, values, ends",
    [
        (EarlyStop("loss", 2), [3, 2, 2.5, 2.4, 1], 4),
        (EarlyStop("test_accuracy", 2), [0.1, 0.3, 0.2, 0.4, 0.3, 0.4], 6),
        (EarlyStop("loss", 2, min_delta=0.5), [3, 2.8, 2.7, 0], 3),
        (EarlyStop("loss", 1, mode="max"), [1, 2, 1], 3),
        (EarlyStop("loss", 2), [math.nan, math.nan], 2),
    ],
)
def test_early_stop_waits_for_what_is_better(stop, values, ends):
    epochs = [Epoch(n, 0.0, value, {"loss": value, "accuracy": value}) for n, value in enumerate(values, 1)]
    assert [stop.on_epoch(fitting(), epoch) for epoch in epochs[:ends]] == [False] * (ends - 1) + [True]
    other = EarlyStop(stop.monitor)
    other.restore(json.loads(json.dumps(stop.state())))
    assert (other.best, other.waited) == (stop.best, stop.waited)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: EarlyStop(patience=0), "patience=0"),
        (lambda: EarlyStop(min_delta=-1), "min_delta=-1"),
        (lambda: EarlyStop(mode="up"), "mode='up'"),
        (lambda: Checkpoint("a", every=0), "every=0"),
        (lambda: Checkpoint("a", keep=True), "keep=True"),
        (lambda: EarlyStop("test_accuracy").check(fitting(measures=("loss",))), "this fit measures loss; test= adds"),
        (lambda: Checkpoint("a", every=2).check(fitting(uneven=True, asynchronous=True)), "give every=None"),
    ],
)
def test_callbacks_say_what_cannot_be(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_early_stop_begins_anew_in_another_fit_and_goes_on_in_a_resumed_one():
    stop = EarlyStop("loss", 2)
    for _ in range(2):
        stop.on_begin(fitting())
        assert [stop.on_epoch(fitting(), Epoch(n, 0.0, 1.0)) for n in (1, 2, 3)] == [False, False, True]
    stop.restore([0.5, 1])
    stop.on_begin(fitting())
    assert stop.on_epoch(fitting(), Epoch(1, 0.0, 1.0))


def test_the_rate_of_the_next_epoch_is_set_and_none_behind_the_last():
    rates = []
    fit = fitting(epochs=2, update_optimizer=lambda learning_rate: rates.append(learning_rate))
    rate = LearningRate(lambda epoch: 1 / epoch)
    rate.on_begin(fit)
    for fit.epoch in (2, 3):
        rate.on_epoch(fit, Epoch(fit.epoch - 1, 0.0, 1.0))
    assert rates == [1.0, 0.5]


def test_states_of_callbacks_are_found_by_class_and_number():
    class Own(Callback):
        def state(self):
            return {1, 2}

    assert list(hooks.states([EarlyStop(), Checkpoint("a"), EarlyStop()])) == ["EarlyStop 0", "EarlyStop 1"]
    with pytest.raises(TypeError, match="Own 0 is no JSON data"):
        hooks.states([Own()])
    assert hooks.describe([EarlyStop("loss", 2), LearningRate(print), Own()]).endswith("mode=None), LearningRate, Own")
