"""Data reach every rank whole, in each of the ways; bad data are refused by all ranks in the same words."""

import numpy as np
import pytest
from mpi4py import MPI

from mpips.mlp import ArraySource, Mesh, SyntheticSource, TextSource, TrainingError, load, open_source
from mpips.mlp.mesh import factorings

from .support import COMM, MESHES, same_everywhere, shared_folder, synthetic

pytestmark = MESHES


WAYS = pytest.mark.parametrize("way", ["read", "scatter"])


def shared_text(tmp_path_factory, lines):
    """The path of a text that all ranks see."""
    path = shared_folder(tmp_path_factory) + "/table.csv"
    if COMM.rank == 0:
        with open(path, "w") as file:
            file.write("\n".join(lines))
    COMM.Barrier()
    return path


def only_at_rank_0():
    if COMM.rank:
        raise TrainingError("no such file here")
    return SyntheticSource(501, 6, 2)


@WAYS
def test_every_way_brings_the_same_rows(way):
    ok, source = [], SyntheticSource(501, 6, 2)
    for batch, model in factorings(COMM.size):
        mesh = Mesh(batch, model)
        opened = only_at_rank_0 if way == "scatter" else lambda: SyntheticSource(501, 6, 2)
        data = load(opened, mesh, 60, "float64", seed=2, way=way)
        table = source.read(0, source.open_part(1, 0))
        x = data.x * data.scaling.x_std + data.scaling.x_mean
        y = data.y * data.scaling.y_std + data.scaling.y_mean
        ok.append(np.allclose(x, table[data.deal.train, :6]) and np.allclose(y, table[data.deal.train, 6:]))
        rows = np.zeros(501)
        rows[data.deal.train] += 1
        rows[data.deal.test] += 1
        mesh.batch_comm.Allreduce(MPI.IN_PLACE, rows)
        ok.append((rows == 1).all() and data.train_rows == 401 and data.test_rows == 100)
        mesh.free()
    assert same_everywhere(all(ok)), ok


class Spy(ArraySource):
    """Notes which rows are asked for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.asked = []

    def read(self, start, stop):
        self.asked += range(self._first + start, self._first + stop)
        return super().read(start, stop)


@WAYS
def test_no_row_is_read_twice_and_no_rank_reads_what_another_does(way):
    x = np.random.default_rng(0).standard_normal((203, 3))
    ok = []
    for batch, model in factorings(COMM.size):
        opened = []

        def spied(opened=opened):
            opened.append(Spy("spied", x, x[:, 0]))
            return opened[-1]

        mesh = Mesh(batch, model)
        data = load(spied, mesh, 20, way=way)
        mesh.free()
        asked = [row for spy in opened for row in spy.asked]
        times = np.zeros(203)
        times[asked] += 1
        COMM.Allreduce(MPI.IN_PLACE, times)
        even = 203 // COMM.size <= len(asked) <= -(-203 // COMM.size)
        ok.append((times == 1).all() and data.way == way and (even if way == "read" else not COMM.rank or not opened))
    assert same_everywhere(all(ok)), ok


def test_what_has_no_parts_is_opened_by_one_rank_only(mesh):
    opened = []

    def compressed():
        opened.append(1)
        return ArraySource("packed", np.ones((40, 2)), np.arange(40.0), apart=False)

    data = load(compressed, mesh, 10)
    assert same_everywhere(len(opened) == (COMM.rank == 0) and (data.way == "read") == (COMM.size == 1))
    if COMM.size > 1:
        with pytest.raises(TrainingError, match="cannot be read in parts"):
            load(compressed, mesh, 10, way="read")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_scaling_and_rows_are_those_of_one_process(tmp_path_factory, save):
    path = shared_folder(tmp_path_factory) + "/data.npz"
    if COMM.rank == 0:
        rng = np.random.default_rng(1)
        save(path, x=5 + 3 * rng.standard_normal((150, 4)), y=rng.standard_normal((150, 2)))
    COMM.Barrier()
    alone = Mesh(1, 1, MPI.COMM_SELF)
    whole = load(lambda: open_source(path), alone, 20, "float64")
    ok = []
    for batch, model in factorings(COMM.size):
        mesh = Mesh(batch, model)
        data = load(lambda: open_source(path), mesh, 20, "float64")
        order = [np.flatnonzero(whole.deal.train == row)[0] for row in data.deal.train]
        ok += [np.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(data.scaling, whole.scaling)]
        ok.append(np.allclose(data.x, whole.x[order], atol=1e-12) and np.allclose(data.y, whole.y[order], atol=1e-12))
        mesh.free()
    assert same_everywhere(all(ok)), ok


def test_auto_sends_rows_where_only_rank_0_can_read_them(mesh):
    data = load(only_at_rank_0, mesh, 10)
    everywhere = load(lambda: SyntheticSource(501, 6, 2), mesh, 10)
    assert same_everywhere(np.array_equal(data.x, everywhere.x) and everywhere.way == "read")
    assert same_everywhere(data.way == ("read" if COMM.size == 1 else "scatter"))


@WAYS
def test_one_bad_line_is_named_on_every_rank(tmp_path_factory, mesh, way):
    path = shared_text(tmp_path_factory, [f"{row},{row % 7},{'two' if row == 30 else row % 5}" for row in range(60)])
    said = ""
    try:
        load(lambda: TextSource(path), mesh, 10, way=way)
    except TrainingError as error:
        said = str(error)
    assert same_everywhere("line 31: column 3 is 'two'" in said), said
    assert len(set(COMM.allgather(said))) == 1


@pytest.mark.parametrize(
    "open_source, arguments, words",
    [
        (synthetic, {"batch": 0}, "at least 1"),
        (synthetic, {"test_share": 1.0}, "less than 1"),
        (synthetic, {"way": "carry"}, "choose auto"),
        (lambda: TextSource("nowhere.csv"), {}, "nowhere.csv does not exist"),
    ],
)
def test_wrong_options_and_missing_files_are_refused(mesh, open_source, arguments, words):
    with pytest.raises(TrainingError, match=words):
        load(open_source, mesh, **{"batch": 5, **arguments})


def labelled(tmp_path_factory, labels):
    """The path of a text with these labels, row by row."""
    return shared_text(tmp_path_factory, ["a,b,kind", *(f"{at},{at % 7},{label}" for at, label in enumerate(labels))])


@WAYS
@pytest.mark.parametrize("names", [("no", "yes"), ("10", "20"), ("1", "2", "3"), ("-1", "1"), ("2", "10"), ("a", "B")])
def test_labels_are_numbered_alike_though_ranks_read_different_ones(tmp_path_factory, mesh, way, names):
    """Each rank's part has labels of its own: the first third of the rows the first, and so on."""
    places = np.arange(60) * len(names) // 60
    path = labelled(tmp_path_factory, [names[place] for place in places])
    data = load(lambda: open_source(path, classify=True), mesh, 10, "float64", way=way)
    expected = sorted(names, key=int if names[0].lstrip("-").isdecimal() else str)
    found = [expected.index(names[place]) for place in places]
    ok = data.outputs == len(names) and data.labels == tuple(expected) and data.classes
    ok = ok and data.y.tolist() == [found[row] for row in data.deal.train]
    assert same_everywhere(ok), (data.outputs, data.labels, data.y)


@WAYS
@pytest.mark.parametrize(
    "labels, words",
    [
        (["no"] * 59 + ["1"], r"line 2: column 3 \(kind\) is 'no', a word, but .*line 61: .* is '1', a number"),
        (["1", "2"] * 29 + ["1", "2.5"], r"line 61: column 3 \(kind\) is '2.5', no label of a class"),
        (["no", "yes"] * 29 + ["no", ""], r"line 61: column 3 \(kind\) is missing"),
        (list(range(60)), "60 rows have 60 different labels, such as 0: they are no classes; leave --classify out"),
    ],
    ids=["mixed", "fraction", "missing", "numbers"],
)
def test_labels_that_are_none_are_named_on_every_rank(tmp_path_factory, mesh, way, labels, words):
    path = labelled(tmp_path_factory, labels)
    with pytest.raises(TrainingError, match=words):
        load(lambda: open_source(path, classify=True), mesh, 10, way=way)


def test_labels_of_arrays_keep_the_classes_that_they_had(mesh):
    x, names = np.random.default_rng(0).standard_normal((50, 2)), np.array(["cat", "dog", "owl"])
    first = load(lambda: ArraySource("labels", x, names[np.arange(50) % 3], classes=0), mesh, 10)
    two = ArraySource("labels", x, names[1:][np.arange(50) % 2], classes=0)
    again = load(lambda: two, mesh, 10, labels=first.labels)
    with pytest.raises(TrainingError, match=r"label 'owl' is none of the checkpoint's, which are cat, dog"):
        load(lambda: ArraySource("labels", x, names[np.arange(50) % 3], classes=0), mesh, 10, labels=("cat", "dog"))
    with pytest.raises(TrainingError, match=r"y\[3\] is 2.5, no label of a class"):
        load(lambda: ArraySource("labels", x, np.where(np.arange(50) == 3, 2.5, 1), classes=0), mesh, 10)
    ok = first.labels == ("cat", "dog", "owl") == again.labels and again.outputs == 3
    assert same_everywhere(ok and set(np.unique(again.y)) <= {1, 2})
