"""What programs hand over as data: tables of every library by position, streams without an end, labels, no numbers."""

from __future__ import annotations

import itertools
import re
import time
import warnings

import numpy as np
import pytest

from mpips.mlp import MLP
from mpips.training import Callback, LearningRate, Progress, Trainer
from tests.mpi.mpips.support import failure
from tests.mpi.mpips.training.support import Line, data, on_workers
from tests.mpi.sizes import only_on

pytestmark = only_on(1, 2, 3, 4)
X, Y = data()
SHUFFLED = np.random.default_rng(3).permutation(len(X))
KINDS = ["dist_sync", "mpi_sync-0"]


class Labelled:
    """Rows that `[...]` finds by labels, as frames and series of pandas do."""

    def __init__(self, array: np.ndarray, labels: np.ndarray = SHUFFLED) -> None:
        self._array, self.index, self.shape, self.dtype = array, labels, array.shape, array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, wanted):
        if isinstance(wanted, slice):
            return Labelled(self._array[wanted], self.index[wanted])
        return Labelled(self._array[[list(self.index).index(label) for label in wanted]], np.asarray(wanted))

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype)


class Frame(Labelled):
    """The same, which can say its values in order."""

    def to_numpy(self) -> np.ndarray:
        return self._array


class Stored:
    """Rows on disk, as h5py has them: numbers of rows must rise."""

    def __init__(self, array: np.ndarray) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, wanted):
        if not isinstance(wanted, slice) and not (np.diff(wanted) > 0).all():
            raise TypeError("Indexing elements must be in increasing order")
        return self._array[wanted]


class Sparse(Stored):
    """Rows without their zeros, as SciPy has them."""

    def __len__(self) -> int:
        raise TypeError("sparse array length is ambiguous; use getnnz()")

    def __getitem__(self, wanted):
        return Sparse(self._array[wanted])

    def tocsr(self):
        return self

    def toarray(self) -> np.ndarray:
        return self._array


class Dataset:
    """Samples one by one, as those of PyTorch, without a shape."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index):
        return self._array[index]


def of_library(name, array):
    """A table of this library, labelled in another order than it lies in."""
    library = pytest.importorskip({"scipy": "scipy.sparse"}.get(name, name))
    if name == "pandas":
        return library.DataFrame(array, index=SHUFFLED) if array.ndim == 2 else library.Series(array, index=SHUFFLED)
    if name == "scipy":
        return library.coo_matrix(array)
    if name == "torch":
        return library.from_numpy(array)
    return library.File(f"{id(array)}", "w", driver="core", backing_store=False).create_dataset("x", data=array)


TABLES = {
    "frame": Frame,
    "stored": Stored,
    "sparse": Sparse,
    **{name: lambda array, name=name: of_library(name, array) for name in ("pandas", "scipy", "h5py", "torch")},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_rows_of_any_table_are_taken_by_position(make, kind):
    """Training, evaluation and prediction give the numbers that arrays of NumPy give."""
    x, y = make(X), make(Y)

    def work(kv, x, y):
        trainer = Trainer(Line(), kv, "sgd", learning_rate=0.05, metrics={"far": lambda out, y: abs(out - y).mean(1)})
        epochs = trainer.fit(x, y, batch_size=3, epochs=2, test=(x, y))
        tested = [value for epoch in epochs for value in (epoch.test or {}).values()]
        losses = [epoch.loss for epoch in epochs]
        return np.concatenate([losses, tested, [*trainer.evaluate(x, y).values()], np.ravel(trainer.predict(x))])

    def both(kv):
        return work(kv, X, Y), work(kv, x, y)

    found = on_workers(kind, both)
    assert found is None or np.allclose(*found, rtol=1e-12)


REFUSED = {
    "labels": (Labelled, "which finds rows by labels, not by position: pass an array of NumPy, such as"),
    "masked": (lambda array: np.ma.masked_array(array, array > 1), "x is a masked array, whose mask would be lost"),
    "objects": (lambda array: array.astype(object), "x holds Python objects: pass numbers"),
    "words": (lambda array: array.astype(str), "x has elements of dtype <U32: pass numbers"),
    "dates": (lambda array: array.astype("M8[D]"), "x has elements of dtype datetime64[D]: pass numbers"),
    "frame": (lambda array: Frame(array.astype(object)), "x is a Frame, which holds Python objects: pass numbers"),
    "lazy": (lambda array: Stored(array.astype(str)), "x is a Stored, which has elements of dtype <U32"),
    "dataset": (lambda array: Dataset(array), "not Dataset; pass an array of NumPy, such as frame.to_numpy(), matrix"),
}


@pytest.mark.parametrize("make, words", REFUSED.values(), ids=REFUSED)
def test_rows_that_are_no_numbers_are_refused_before_the_first_step(make, words):
    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        x = make(X) if kv.rank == kv.num_workers - 1 else X  # one worker's word is enough
        said = [failure(lambda: trainer.fit(x, Y, batch_size=2, epochs=1)), failure(lambda: trainer.evaluate(x, Y))]
        tested = failure(lambda: trainer.fit(X, Y, batch_size=2, epochs=1, test=(x, Y)))
        words_of_test = words.replace("x is", "test inputs is").replace("x h", "test inputs h")
        assert all(words in each for each in said) and words_of_test in tested, (said, tested)
        assert len(trainer.fit(X, Y, batch_size=2, epochs=1)) == 1

    on_workers("mpi_sync-0", work)


@pytest.mark.parametrize("table", ["masked", "frame", "stored"])
def test_steps_on_a_network_of_ours_take_tables_too(table):
    def work(kv):
        model = MLP((4, 2), dtype="float64")
        trainer = Trainer(model, kv, "sgd")
        if table == "masked":
            assert "y is a masked array" in failure(lambda: trainer.step(X, np.ma.masked_array(Y, Y > 0)))
            assert "x is a masked array" in failure(lambda: trainer.predict(np.ma.masked_array(X, X > 0)))
        else:
            assert trainer.step(TABLES[table](X), TABLES[table](Y)) == pytest.approx(
                MLP((4, 2), dtype="float64").loss_and_gradients(X, Y)
            )

    on_workers("mpi_sync-0", work)


LABELS = {
    "one too many": (np.arange(50) % 3, "y has classes from 0 to 2, and this network has 2 outputs: number"),
    "negative": (np.arange(50) % 2 * 2 - 1, "y has classes from -1 to 1, and this network has 2 outputs"),
    "floats": ((np.arange(50) % 2) / 1, "takes the classes of the samples as whole numbers (samples,), perhaps y.as"),
    "one hot": (np.eye(2)[np.arange(50) % 2], "as whole numbers (samples,), perhaps y.argmax(axis=1)"),
    "words": (np.array(["no", "yes"] * 25), "y has elements of dtype <U3: pass numbers"),
}


@pytest.mark.parametrize("y, words", LABELS.values(), ids=LABELS)
def test_labels_that_no_output_stands_for_are_refused_on_all_workers_before_the_first_step(y, words):
    def work(kv):
        model = MLP((4, 3, 2), loss="softmax", dtype="float64")
        trainer = Trainer(model, kv, "sgd")
        before = model.flat_parameters.tobytes()
        good = np.arange(50) % 2
        said = [
            failure(lambda: trainer.fit(X, y, batch_size=2, epochs=1)),
            failure(lambda: trainer.evaluate(X, y)),
            failure(lambda: trainer.fit(X, good, batch_size=2, epochs=1, test=(X, y))),
        ]
        said = [each.replace("test targets", "y") for each in said]
        assert all(words in each for each in said), said
        assert model.flat_parameters.tobytes() == before
        assert len(trainer.fit(X, good, batch_size=2, epochs=1)) == 1

    on_workers("dist_sync", work)


# ---- streams


def forever():
    while True:
        yield X[:2], Y[:2]


class Forever:
    def __iter__(self):
        return forever()


@pytest.mark.parametrize(
    "stream", [forever, lambda: Forever(), lambda: lambda epoch: forever()], ids=["iterator", "iterable", "function"]
)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_stream_without_an_end_has_steps(stream, accumulate):
    def work(kv):
        trainer = Trainer(Line(), kv, "sgd", accumulate=accumulate)
        steps = []
        epochs = trainer.fit(stream(), epochs=3, steps=4, on_epoch=lambda epoch: steps.append(trainer._position.step))
        return len(epochs), steps

    assert on_workers("dist_sync", work) in (None, (3, [4, 8, 12]))


def test_an_iterator_goes_on_in_the_next_epoch_and_its_end_is_said():
    def work(kv):
        seen = []

        class Seeing(Line):
            def loss_and_gradients(self, x, y):
                seen.append(x[0, 0])
                return super().loss_and_gradients(x, y)

        trainer = Trainer(Seeing(), kv, "sgd")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.fit(((X[i : i + 1], Y[i : i + 1]) for i in range(5)), epochs=3, steps=3)
        words = [str(each.message) for each in said if "no worker has a batch in epoch 3" in str(each.message)]
        assert seen == X[:5, 0].tolist() and (kv.rank or words), (seen, words)

    on_workers("mpi_sync-0", work)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"steps": 0}, "steps=0: give at least 1"),
        ({"steps": 2.5}, "steps=2.5: give a whole number"),
        ({"steps": 3, "x": X, "y": Y, "batch_size": 2}, "steps= goes with batches: an epoch of arrays"),
        ({"x": "train.csv"}, "an iterable of batches (x, y), or a function of the epoch that returns one, not a str"),
        ({"x": {"a": X}}, "returns one, not a dict"),
    ],
)
def test_steps_that_cannot_be_are_refused(options, words):
    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        assert words in failure(lambda: trainer.fit(**{"x": Forever(), "epochs": 2, **options}))
        if kv.num_workers > 1:
            unlike = failure(lambda: trainer.fit(Forever(), epochs=2, steps=2 + kv.rank % 2))
            assert "argument 'steps' is 2 on rank 0 and 3 on rank 1" in unlike

    on_workers("mpi_sync-0", work)


def test_one_stream_without_an_end_among_others_that_end_is_said_on_all_workers():
    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        if kv.num_workers > 1:
            said = failure(lambda: trainer.fit([(X, Y)] * 2 if kv.rank != 1 else Forever(), epochs=2))
            assert "has batches for 2,200 steps on rank 1, where another worker has them for 2" in said, said

    on_workers("mpi_sync-0", work)


UNLIKE = {
    "shards": lambda rank: (X[rank::2], Y[rank::2]),
    "shuffled": lambda rank: (X[order(rank)], Y[order(rank)]),
    "labels": lambda rank: (X, Y[order(rank)]),
}


def order(rank):
    """Of a shuffle whose seed is the rank."""
    return np.random.default_rng(rank).permutation(len(X))


@pytest.mark.parametrize("make", UNLIKE.values(), ids=UNLIKE)
def test_arrays_that_differ_between_workers_are_refused(make):
    """Of a worker's own shard a share would be trained; shuffled by other seeds rows would come twice and never."""

    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        mine = make(kv.rank % 2)
        said = [
            failure(lambda: trainer.fit(*mine, batch_size=2, epochs=1)),
            failure(lambda: trainer.fit(X, Y, batch_size=2, epochs=1, test=mine)),
        ]
        words = r"fit: the arrays differ between workers, as \S+ on rank 0 and \S+ on rank 1: give all the same"
        assert kv.num_workers < 2 or all(re.match(words, each) for each in said), said
        nearly = X * (1 + 1e-7 * kv.rank)  # as another machine rounds
        assert len(trainer.fit(nearly, Y, batch_size=2, epochs=1)) == 1

    on_workers("mpi_sync-0", work)


class Scored(Line):
    """A model that has an accuracy."""

    def loss(self, x, y):
        return 1.0

    def accuracy(self, x, y):
        return 1.0


@pytest.mark.parametrize("mixed", ["workers", "batches"])
def test_an_accuracy_of_some_samples_alone_is_refused(mixed):
    """Labels that are floats on one worker, or in one batch, halved the accuracy in silence."""
    classes, floats = np.arange(10) % 2, np.arange(10) % 2 / 1

    def work(kv):
        trainer = Trainer(Scored(), kv, "sgd")
        both = [(X[:10], classes), (X[:10], floats)]
        mine = both if mixed == "batches" else both[min(kv.rank, 1) :][:1]
        said = failure(lambda: trainer.evaluate(mine))
        if mixed == "batches":
            assert "y are classes, whole numbers (samples,), for 10 samples and not for the other 10" in said
        elif kv.num_workers > 1:
            assert "evaluate: accuracy is measured on rank 0 and missing on rank 1, where y are no classes" in said
        assert trainer.evaluate([(X[:10], classes)] if kv.rank == 0 else [])["accuracy"] == 1.0

    on_workers("mpi_sync-0", work)


class Labels:
    """Targets of a library whose dtypes NumPy does not know, as tensors have them."""

    def __init__(self, dtype: str) -> None:
        self.shape, self.ndim, self.dtype = (10,), 1, type("dtype", (), {"__repr__": lambda self: dtype})()

    def __len__(self) -> int:
        return 10


def test_labels_of_any_library_are_classes_where_they_are_whole_numbers():
    def work(kv):
        trainer = Trainer(Scored(), kv, "sgd")
        whole, floats = [trainer.evaluate([(X[:10], Labels(f"torch.{kind}64"))]) for kind in ("int", "float")]
        assert (whole, floats) == ({"loss": 1.0, "accuracy": 1.0}, {"loss": 1.0})

    on_workers("mpi_sync-0", work)


@pytest.mark.parametrize("kind", KINDS)
def test_rates_of_local_losses_are_told_with_both_values_and_ranks(kind):
    class Plateau(Callback):
        """What programs write for ReduceLROnPlateau: each worker looks at its own loss."""

        def on_epoch(self, fit, epoch):
            fit.update_optimizer(learning_rate=epoch.loss / 100)

    def work(kv):
        said = []
        for callback in (LearningRate(lambda epoch: 0.1 / (1 + kv.rank)), Plateau()):
            trainer = Trainer(Line(), kv, "sgd", learning_rate=0.1)
            said.append(failure(lambda: trainer.fit(X, Y, batch_size=2, epochs=2, callbacks=[callback])))  # noqa: B023
        assert kv.num_workers < 2 or "'learning_rate' is 0.1 on rank 0 and 0.05 on rank 1" in said[0], said
        assert kv.num_workers < 2 or re.search(r"'learning_rate' is \S+ on rank 0 and \S+ on rank 1", said[1]), said

    on_workers(kind, work)


def test_an_empty_batch_of_a_step_is_refused_on_its_rank():
    def work(kv):
        trainer = Trainer(Line(), kv, "sgd")
        words = f"step: the batch of rank {kv.rank} has no sample, so no mean"
        assert words in failure(lambda: trainer.step(X[:0], Y[:0]))
        assert trainer.step(X, Y) > 0

    on_workers("mpi_sync-0", work)


@pytest.mark.parametrize("batches", [False, True])
def test_progress_says_a_line_an_epoch_and_steps_of_long_ones(batches, capfd, monkeypatch):
    class Slow(Scored):
        def loss_and_gradients(self, x, y):
            time.sleep(0.04)
            return super().loss_and_gradients(x, np.c_[y, y])

    def work(kv):
        monkeypatch.setattr("mpips.training.callbacks.QUIET_SECONDS", 0.03)
        given = {"x": [(X[:2], np.zeros(2, int))] * 5} if batches else {"x": X, "y": np.zeros(50, int), "batch_size": 5}
        trainer = Trainer(Slow(), kv, "sgd")
        trainer.fit(**given, epochs=2, test=(X, np.zeros(50, int)), callbacks=[Progress()])
        return kv.rank, 50 // (5 * kv.num_workers)

    found = on_workers("mpi_sync-0", work)
    lines = capfd.readouterr().err.splitlines()
    ended = r"epoch [12] of 2, loss \S+, test loss 1, test accuracy 100\.00 %"
    ends = [line for line in lines if re.fullmatch(ended, line)]
    total = "" if batches else f" of {found[1]}"
    middle = [line for line in lines if re.fullmatch(rf"epoch [12] of 2, \d+{total} steps, loss \S+", line)]
    assert (len(ends), bool(middle)) == ((2, True) if found[0] == 0 else (0, False)), lines
    assert len(ends) + len(middle) == len(lines)


def test_a_batch_without_samples_has_no_weight():
    """A rank whose batch is empty (a filter, the end of its shard) neither fails nor brings NaN."""

    def work(kv):
        empty, full = (X[:0], Y[:0]), (X[:4], Y[:4])
        model, alike = Line(), Line()
        loss = Trainer(model, kv, "sgd").fit([empty if kv.rank else full, full], epochs=1)[-1].loss
        batches = itertools.islice([full, full], 2 if kv.rank == 0 else 1)
        Trainer(alike, kv, "sgd").fit(list(batches), epochs=1)
        assert np.isfinite(loss) and np.allclose(model.parameters[0], alike.parameters[0], rtol=1e-12)

    on_workers("mpi_sync-0", work)
