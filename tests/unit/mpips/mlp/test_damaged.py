"""Damaged and foreign files: every reader says one sentence, and allocates nothing on a file's word."""

from __future__ import annotations

import io
import random
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpips.mlp import TrainingError, checkpoint
from mpips.mlp.data.base import read_checked
from mpips.mlp.data.sources import open_source
from tests import damage

MUTATIONS = 500
SLACK = 7 << 18
"""Bytes that a reader takes whatever the file."""
X = np.random.default_rng(0).normal(size=(24, 3))
Y = np.arange(24) % 3


def text(quoted: bool) -> bytes:
    names = ["setosa", "versicolor", "virginica"]
    rows = [f'{a:.4f};"{b:.4f}";{c:.4f};"{names[y]}"' for (a, b, c), y in zip(X, Y)]
    if not quoted:
        rows = [f"{a:.4f},{b:.4f},{c:.4f},{y}" for (a, b, c), y in zip(X, Y)]
    return "\n".join(['"a";"b";"c";"kind"' if quoted else ",b,c,kind", *rows]).encode()


def arrays(save: Callable[..., None]) -> bytes:
    file = io.BytesIO()
    save(file, x=X, y=Y)
    return file.getvalue()


def read_rows(path: Path) -> None:
    source = open_source(str(path), classify=True)
    source.check()
    rows = source.open_part(1, 0)
    source.number(sorted(source.labels()))
    read_checked(source, 0, rows)


FILES: dict[str, tuple[str, bytes]] = {
    "csv": ("d.csv", text(False)),
    "quoted": ("d.csv", text(True)),
    "npz": ("d.npz", arrays(np.savez)),
    "compressed npz": ("d.npz", arrays(np.savez_compressed)),
}


def mutated(whole: bytes, seed: int) -> bytes:
    """A file with a bit flipped, a number or a part written over, taken out or put in twice, or without its end."""
    rng = random.Random(seed)
    data, at = bytearray(whole), rng.randrange(len(whole))
    kind = rng.randrange(6)
    if kind == 0:
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        data[at : at + 8] = rng.choice([bytes(8), b"\xff" * 8, (1 << 40).to_bytes(8, "little"), b"99999999"])
    elif kind == 2:
        del data[at : at + rng.randrange(1, 40)]
    elif kind == 3:
        data[at:at] = data[at : at + rng.randrange(1, 40)]
    elif kind == 4:
        del data[at:]
    else:
        data[at : at + 1] = rng.choice([b'"', b"\r", b"\n", b"\0", b",", b"\x80", b"1e999", b"-", b"[", b"{"])
    return bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_gives_a_sentence_and_little_is_allocated(tmp_path, name):
    file, whole = FILES[name]
    path = tmp_path / file
    path.write_bytes(whole)
    read_rows(path)
    refused = 0
    for seed in range(MUTATIONS):
        data = mutated(whole, seed)
        path.unlink()  # an old one may be mapped still
        path.write_bytes(data)
        said = damage.refused(lambda: read_rows(path), 2 * len(data) + SLACK, TrainingError, always=True)
        refused += said is not None
        assert said is None or file in said, (seed, said)
    assert refused > MUTATIONS / 4


def test_a_bit_that_is_flipped_in_an_npz_is_noticed(tmp_path):
    """In its arrays as in its headers: the zip has their checksums, which a mapped array does not ask."""
    path = tmp_path / "d.npz"
    whole = arrays(np.savez)
    start, stop = whole.index(b"\x93NUMPY"), whole.rindex(b"PK\x01\x02")
    missed = []
    for seed in range(100):
        data, at = bytearray(whole), random.Random(seed).randrange(start, whole.index(b"PK\x01\x02"))
        data[at] ^= 1 << seed % 8
        path.unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            read_rows(path)
        except TrainingError:
            continue
        missed.append(at)
    assert stop > start and len(missed) <= 10, missed  # the time of a member, which nobody reads


class Unpickled:
    def __reduce__(self):
        return (pytest.fail, ("an array was unpickled",))


@pytest.mark.parametrize("compressed", [False, True])
def test_objects_are_never_unpickled(tmp_path, compressed):
    path = str(tmp_path / "d.npz")
    save = np.savez_compressed if compressed else np.savez
    save(path, x=X, y=np.array([Unpickled()] * 24, object))
    with pytest.raises(TrainingError, match=r"y\.npy holds Python objects, which are not unpickled: save numbers"):
        open_source(path)


@pytest.mark.parametrize("shape", ["(1000000000000, 3)", "(-1, 3)", "(24, 3, 5)", "(24,)"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_header_is_believed_as_far_as_there_are_bytes(tmp_path, shape, method):
    path = tmp_path / "d.npz"
    with zipfile.ZipFile(io.BytesIO(arrays(np.savez))) as good, zipfile.ZipFile(path, "w", method) as bad:
        content = good.read("x.npy")
        old = content[content.index(b"(24") : content.index(b"\n")]
        bad.writestr("x.npy", content.replace(old, f"{shape}, }}".ljust(len(old)).encode(), 1))
        bad.writestr("y.npy", good.read("y.npy"))
    with pytest.raises(TrainingError, match=r"x.npy is float64\(.*\), [-\d,]+ bytes, by its header, and has 576"):
        open_source(str(path))


FOREIGN = {
    "array of NumPy": (b"\x93NUMPY\x01\x00v\x00{'descr'", "an array of NumPy: save inputs and targets as np.savez"),
    "spreadsheet": (b"PK\x03\x04\x14\x00", "a zip, as spreadsheets are: export it as CSV"),
    "gzip": (b"\x1f\x8b\x08\x00", "compressed by gzip: unpack it first"),
    "UTF-16": ("a,b\n1,2\n".encode("utf-16"), "text in UTF-16: save it in UTF-8"),
    "zeros": (b"a,b\n1,\x00\x00\n", "no text, as it holds zero bytes"),
}


@pytest.mark.parametrize("content, words", FOREIGN.values(), ids=FOREIGN)
def test_foreign_files_are_called_by_their_name(tmp_path, content, words):
    path = tmp_path / "data.csv"
    path.write_bytes(content)
    with pytest.raises(TrainingError, match=words):
        open_source(str(path))


@pytest.mark.parametrize("content", [b"", b"{}", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", b"\xff" * 400])
def test_what_is_no_checkpoint_is_said(tmp_path, content):
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    for read in (checkpoint.read_header, checkpoint.read_scaling):
        with pytest.raises(TrainingError, match=r"other\.safetensors"):
            read(str(path), MPI.COMM_SELF)
