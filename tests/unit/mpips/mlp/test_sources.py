"""Rows from text files, arrays and numbers."""

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpips.mlp import ArraySource, SyntheticSource, TextSource, TrainingError, open_source
from mpips.mlp.data.base import read_checked

TABLE = np.array([[1.0, 2.5, -3.0], [4.0, 5.0, 6e3], [7.0, 8.0, 9.0]])
ABC = "a,b,c\n1,2.5,-3\n4,5,6e3\n\n7,8,9\n"


def everything(source, parts=1):
    """All rows, read part by part."""
    tables = []
    for index in range(parts):
        rows = source.open_part(parts, index)
        tables += [read_checked(source, 0, rows // 2), read_checked(source, rows // 2, rows)]
    return np.concatenate(tables)


def numbered(source):
    """All rows, with labels as classes."""
    rows = source.open_part(1, 0)
    source.number(sorted(source.labels(), key=lambda label: (len(label), label)))
    return read_checked(source, 0, rows)


def write(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_bytes(text.encode())
    return str(path)


# ---- texts


@pytest.mark.parametrize("separator", [",", "\t", " ", "   ", " , ", ";", "|"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n  \n"])
def test_text_with_any_separator_is_read(tmp_path, separator, end):
    lines = [separator.join(str(value) for value in row) for row in TABLE]
    source = TextSource(write(tmp_path, "\n".join(lines) + end))
    assert (source.open_part(1, 0), source.features, source.targets) == (3, 2, 1)
    np.testing.assert_array_equal(source.read(1, 3), TABLE[1:])
    assert source.read(1, 1).shape == (0, 3)


LINES = st.lists(st.sampled_from(["1,2", "30,4.5", "", "  ", "-7e2,123456789"]), min_size=1)


@given(st.integers(1, 9), LINES, st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_of_a_text_hold_every_line_once(tmp_path, parts, lines, windows):
    lines = ["a,b", "1,2", *lines]
    path = write(tmp_path, ("\r\n" if windows else "\n").join(lines))
    expected = [[float(field) for field in line.split(",")] for line in lines[1:] if line.strip()]
    np.testing.assert_array_equal(everything(TextSource(path), parts), expected)


@pytest.mark.parametrize(
    "text, options, expected",
    [
        (ABC, {"target": ["a"], "features": ["c"]}, TABLE[:, [2, 0]]),
        (ABC, {"target": ["3", "a"]}, TABLE[:, [1, 2, 0]]),
        ("day,x,y\nmonday,1,2\ntuesday,3,4\n", {"features": ["x"]}, [[1, 2], [3, 4]]),
        ("2019,2020,sales\n1,2,3\n4,5,6\n", {"target": ["2019"], "header": True}, [[2, 3, 1], [5, 6, 4]]),
        ("a,nan\n1,2\n", {"target": ["nan"], "header": True}, [[1, 2]]),
        ('\ufeff"the price, in euro", "size"\n"1","2"\n3,4\n', {"target": ["the price, in euro"]}, [[2, 1], [4, 3]]),
        ("1,-1e100\n", {}, [[1, -1e100]]),
    ],
    ids=["by name", "two targets", "words not read", "years", "nan", "quoted", "large"],
)
def test_columns_are_chosen_by_name_or_number(tmp_path, text, options, expected):
    np.testing.assert_array_equal(everything(TextSource(write(tmp_path, text), **options)), expected)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter, called", [(";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "")])
def test_quoted_names_and_any_end_of_lines_are_read(tmp_path, delimiter, called, end):
    """As the UCI repository ships its tables: every name in quotes, semicolons between."""
    lines = ['"fixed, acidity"|"sugar"|"quality"', "", "7.4|1.9|5", '"7.8"|2.6|6', "  "]
    source = TextSource(write(tmp_path, "\ufeff" + end.join(lines).replace("|", delimiter)), target=["quality"])
    np.testing.assert_array_equal(everything(source, 2), [[7.4, 1.9, 5], [7.8, 2.6, 6]])
    assert "column 1 (fixed, acidity)" in source.columns()
    assert (f"fields separated by {called}" in source.columns()) == bool(called)


@pytest.mark.parametrize("first", ["", '""', "Unnamed: 0"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_index_of_a_frame_is_no_feature(tmp_path, first, delimiter):
    """As `to_csv` of pandas writes it: a first column without a name; its rows may be shuffled, or have words."""
    lines = [f"{first}|a|b|price", "7|1|2|3", "row 2|4|5|6"]
    source = TextSource(write(tmp_path, "\n".join(lines).replace("|", delimiter)))
    np.testing.assert_array_equal(everything(source), [[1, 2, 3], [4, 5, 6]])
    assert "column 1 left out: the index of a frame" in source.columns()
    chosen = TextSource(write(tmp_path, ",a,b\n7,1,2\n8,4,5"), features=["1", "a"])
    np.testing.assert_array_equal(everything(chosen), [[7, 1, 2], [8, 4, 5]])
    assert "left out" not in chosen.columns()


@pytest.mark.parametrize(
    "text, options, words",
    [
        ("", {}, "is empty"),
        ("1,2\n3\n", {}, "line 2: 1 columns where the first line has 2"),
        ("1,2\n3,4,5\n", {}, "line 2: 3 columns"),
        ("1,2\n\n3,x\n", {}, "line 3: column 2 is 'x'"),
        ("1,2\n3,\n", {}, "line 2: column 2 is missing"),
        ("1,2\n3,inf\n", {}, "line 2: column 2 is 'inf'"),
        ("1,2\nNaN,3\n", {}, "line 2: column 1 is 'NaN'"),
        ("5\n6\n", {}, "some must be features"),
        ("a:b:c\n1:2:3\n", {}, r"1 column.*by commas, semicolons, tabs, bars.*line 1 is 'a:b:c'"),
        ("a;b\n1,5;2\n", {}, "is '1,5', not a finite number; write it without commas, with a point before decimals"),
        ("a,b\n1,2\r3,4\n5,6\n", {}, "line 2 holds another line's end in its middle"),
        ('a,b\n"1,2\n3,4\n', {}, "line 2: 1 columns where the first line has 2, separated by commas"),
        ('"a\nb",c\n1,2\n', {}, "1 column, but some must be features"),
        ("a\tb\n1\n", {}, "separated by tabs"),
        ("a,kind\n1,no\n2,yes\n", {}, r"column 2 \(kind\) is 'no'.*or say --classify if it is a label"),
        ("2019,sales\n1,2\n", {}, r"line 1: column 2 is 'sales'.*say --header"),
        ("a,b\n1,2\n", {"header": False}, "line 1: column 1 is 'a'"),
        (",\n1,2\n", {}, "line 1: column 1 is missing"),
        ("NA,?\n1,2\n", {}, "column 1 is missing"),
        ("a,a\n1,2\n", {}, "line 1: column 2 is 'a' as a column before"),
        ("a,\n1,2\n", {"header": True}, "column 2 is missing"),
        ("\n\na,\n1,2\n", {}, "line 3: column 2 is missing"),
        ("\n1,b\n1,2\n", {}, r"line 2: column 2 is 'b'.*say --header"),
        ("size,price\n1,1e100\n2,-1e300\n", {}, r"line 3: column 2 \(price\) is '-1e300', whose size is above 1e\+140"),
        (ABC, {"target": ["sound"]}, "no column 'sound': the columns are a, b, c; or give a number from 1 to 3"),
        (ABC, {"target": ["4"]}, "from 1 to 3"),
    ],
)
def test_bad_text_is_named_with_line_column_and_cure(tmp_path, text, options, words):
    with pytest.raises(TrainingError, match=words):
        everything(TextSource(write(tmp_path, text), **options))


# ---- labels

LABELS = {
    "1 2 3": ([0, 1, 2], ["1", "2", "3"]),
    "10 20": ([0, 1], ["10", "20"]),
    "-1 1": ([1, 0], ["1", "-1"]),
    "no yes": ([0, 1], ["no", "yes"]),
    "0 2.0": ([0, 1], ["0", "2"]),
    "good very_good": ([0, 1], ["good", "very good"]),
}


@pytest.mark.parametrize("labels", LABELS)
def test_labels_are_numbered_whatever_they_are(tmp_path, labels):
    given = [label.replace("_", " ") for label in labels.split()]
    classes, names = LABELS[labels]
    text = write(tmp_path, "\n".join(["a,kind", *(f'{row},"{label}"' for row, label in enumerate(given))]))
    np.savez(
        tmp_path / "d.npz",
        x=np.arange(len(given))[:, None],
        y=np.array([float(label) for label in given] if labels[-1].isdecimal() else given),
    )
    for path in (text, str(tmp_path / "d.npz")):
        source = open_source(path, classify=True)
        np.testing.assert_array_equal(numbered(source)[:, 1], classes)
        assert source.classes == len(names) and set(source.labels()) == set(names)


@pytest.mark.parametrize("label", ["", "?", "NaN", "NA", "1.5", "inf"])
def test_what_is_no_label_is_named_with_its_place(tmp_path, label):
    words = "is missing" if not label else "no label of a class: labels are whole numbers, or words"
    with pytest.raises(TrainingError, match=rf"line 3: column 2 \(kind\) .*{words}"):
        numbered(open_source(write(tmp_path, f"a,kind\n1,2\n2,{label}\n3,4\n"), classify=True))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_is_no_class_number_is_named_with_its_place(tmp_path, save):
    path = write(tmp_path, "x,label\n1,0\n2,1\n3,1.5\n")
    with pytest.raises(TrainingError, match=r"line 4: column 2 \(label\) is '1.5', not a class number"):
        everything(open_source(path, classify=True))
    save(tmp_path / "d.npz", x=TABLE, y=np.array([0, 1, -1]))
    with pytest.raises(TrainingError, match=r"y\[2\] is -1, not a class number"):
        everything(open_source(str(tmp_path / "d.npz"), classify=True))


# ---- arrays, sets and numbers


@pytest.mark.parametrize("name", ["table.csv", "table.npz"])
def test_a_part_costs_memory_for_that_part_only(tmp_path, name):
    rows = 40_000
    path = tmp_path / name
    x = np.random.default_rng(0).standard_normal((rows, 8))
    if name.endswith(".npz"):
        np.savez(path, x=x, y=x[:, 0])
    else:
        np.savetxt(path, np.c_[x, x[:, 0]], "%.6f", ",")
    tracemalloc.start()
    source = open_source(str(path))
    count = source.open_part(100, 40)
    table = source.read(0, count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert abs(count - rows / 100) < rows / 1000
    np.testing.assert_allclose(table[:, 0], table[:, 8])
    assert peak < os.path.getsize(path) / 5


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_saved_arrays_hold_what_was_saved(tmp_path, save, order, parts):
    """Those that are compressed have no parts: one rank reads them whole."""
    x, y = np.asarray(TABLE, ">f4", order=order), np.array([[1, 2], [3, 4], [5, 6]])
    save(tmp_path / "d.npz", x=x, y=y)
    source = open_source(str(tmp_path / "d.npz"))
    assert source.apart == (save is np.savez)
    np.testing.assert_array_equal(everything(source, parts), np.c_[x, y])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_arrays_are_named(tmp_path, bad):
    path = str(tmp_path / "d.npz")
    np.savez(path, inputs=TABLE)
    with pytest.raises(TrainingError, match="named x and y, not inputs"):
        open_source(path)
    np.savez(path, x=TABLE, y=np.where(np.arange(3) == 1, bad, 0))
    with pytest.raises(TrainingError, match=r"y\[1\] is (nan|inf), not a finite number"):
        everything(open_source(path))
    with pytest.raises(TrainingError, match=r"x\[1, 2\] is (nan|inf)"):
        everything(ArraySource("a", np.where(TABLE == 6e3, bad, TABLE), np.zeros(3)))
    with pytest.raises(TrainingError, match=r"x \(3, 3\)"):
        ArraySource("a", TABLE, np.zeros(2))
    with pytest.raises(TrainingError, match="must hold numbers"):
        ArraySource("a", TABLE, np.array(["a", "b", "c"]))


def test_synthetic_rows_do_not_depend_on_which_others_are_read():
    source = SyntheticSource(10_000, 3, 2)
    whole = everything(source)
    assert whole.shape == (10_000, 5)
    np.testing.assert_array_equal(everything(source, 7), whole)
    assert source.columns() == "3 features -> 2 targets"
    assert open_source("synthetic:50,1,1").columns() == "1 feature -> 1 target"
    assert open_source("synthetic").open_part(1, 0) == 700_000


def test_mnist_is_read_from_a_file_of_its_format(tmp_path):
    rng = np.random.default_rng(0)
    table = np.concatenate([rng.integers(0, 256, (12, 784)), rng.integers(0, 10, (12, 1))], axis=1)
    np.savetxt(tmp_path / "mnist_5k.csv.gz", table, "%d", ",")
    source = open_source("mnist", directory=str(tmp_path))
    assert (source.features, source.targets, source.classes, source.apart) == (784, 1, 10, False)
    np.testing.assert_allclose(everything(source), table / ([255.0] * 784 + [1.0]))
    np.savetxt(tmp_path / "mnist_5k.csv.gz", np.zeros((2, 10)), "%d", ",")
    with pytest.raises(TrainingError, match="10 columns, not 784 pixels and a label"):
        open_source("mnist", directory=str(tmp_path))
    write(tmp_path, "this is no gzip file", "mnist_5k.csv.gz")
    with pytest.raises(TrainingError, match="cannot be read as a table of images"):
        open_source("mnist", directory=str(tmp_path))


@pytest.mark.parametrize(
    "data, options, words",
    [
        ("nowhere.npz", {}, "does not exist"),
        ("nowhere.csv", {}, "does not exist"),
        ("synthetic:a,b,c", {}, "ROWS,FEATURES,TARGETS"),
        ("synthetic:1,2,3,4", {}, "ROWS,FEATURES,TARGETS"),
        ("synthetic:0,1,1", {}, "at least 1"),
        ("synthetic", {"target": ["a"]}, "can be chosen in a delimited text only"),
        ("airfoil", {}, "UCI"),
    ],
)
def test_what_cannot_be_opened_is_named(tmp_path, data, options, words):
    with pytest.raises(TrainingError, match=words):
        open_source(data, directory=str(tmp_path), **options)
