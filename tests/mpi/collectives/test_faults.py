"""What ends a communicator: every rank raises the same sentence soon, and `renew` begins another that sums exactly.

A few cells of the table (`cells`) are made on each number of ranks; `make test-all` makes all of them on one node.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import StallError
from tests.choice import first
from tests.mpi.collectives import faults
from tests.mpi.collectives.cells import DEADLY, LIVING, ROUTES, WAYS, cells
from tests.mpi.collectives.fault_table import Place, deadly
from tests.mpi.collectives.support import (
    ODD,
    RANK,
    WORLD,
    P,
    fresh,
    hear,
    patient,
    sentence,
    share_nothing,
    still_works,
)
from tests.mpi.sizes import only_on


def few(fault, of=1):
    """Cells of a fault: each route once, or one route `of` so many, by ways that differ with the number of ranks."""
    turn = LIVING.index(fault) + P
    ways = {route: "blocking" if route == "grouped" else WAYS[(turn + i) % len(WAYS)] for i, route in enumerate(ROUTES)}
    return [(fault, way, route) for route, way in ways.items()][turn % of :: of]


def wrong(nodes, made):
    """What is not as it should be in these cells, which are made cold and warm by turns."""
    found = {}
    for number, (fault, way, route) in enumerate(made):
        with fresh(nodes) as comm:
            words = faults.run(comm, fault, way, route, warm=(number + P) % 2 == 0).wrong(fault)
        if words:
            found[fault, way, route] = words
    return found


@pytest.mark.core(4)
@only_on(2, 3)
@pytest.mark.parametrize("fault", LIVING)
def test_a_fault_on_one_node(fault):
    assert not wrong("one node", few(fault))


@pytest.mark.full
@only_on(3)
@pytest.mark.parametrize("fault", LIVING)
def test_a_fault_on_one_node_by_every_way_and_route(fault):
    assert not wrong("one node", cells([fault]))


@pytest.mark.core(2)
@only_on(2, 3, 5)
@pytest.mark.parametrize("fault", LIVING)
def test_a_fault_between_nodes(fault):
    assert not wrong("a node for each rank", few(fault, of=2))


@only_on(4, 7)
@pytest.mark.parametrize("fault", LIVING)
def test_a_fault_on_many_ranks(fault):
    nodes = "nodes of two" if P % 2 == 0 else "one node"
    assert not wrong(nodes, few(fault))


@pytest.mark.core(1)
@only_on(1)
@first(
    3,
    **{
        "fault, way, route": [
            ("exit", "tested", "ring"),
            ("exception", "plan", "large"),
            ("kill", "waited", "empty"),
            ("exit", "blocking", "small"),
            ("kill", "blocking", "grouped"),
            ("kill", "tested", "native"),
        ]
    },
)
def test_a_rank_that_dies(fault, way, route):
    assert fault in DEADLY
    assert not deadly(Place(sys.executable), fault, way, route).wrong


BAD_ARRAYS = [
    (lambda x: x.reshape(100, 10)[:, 3:7], "not C-contiguous"),
    (lambda x: np.broadcast_to(x[:1], (400,)), "read-only|not C-contiguous"),
    (lambda x: x[:400].astype(object), "object"),
    (lambda x: [x[:400], "x"], "str"),
    (lambda x: None, "NoneType"),
    (lambda x: [x[:400], x[:300]], "size"),
    (lambda x: x[:400].astype(">f8"), "float64"),
    (lambda x: np.ma.masked_array(x[:400], x[:400] > 0), "masked array, whose mask would be lost"),
    (lambda x: x[:400].astype("M8[s]"), "datetime64"),
    (lambda x: x[:400].astype(str), "str"),
]
BAD_WORDS = [
    ("allreduce", {"algorithm": "quicksort"}, "quicksort.*ring"),
    ("allreduce", {"op": "xor"}, "xor"),
    ("allreduce", {"op": MPI.SUM}, "of type Op: pass one of sum, min"),  # unhashable
    ("allreduce", {"algorithm": ["ring"]}, "of type list: pass a name"),
    ("broadcast", {"root": P}, f"choose one from 0 to {P - 1}"),
    ("reduce", {"root": "0"}, "root '0' is of type str: pass a rank's number"),
    ("reduce_scatter", {"algorithm": "reproducible"}, "reproducible serves allreduce"),
    ("allreduce", {"algorithm": f"bcube(n={P + 1},k=2)"}, str(P)),
    ("allreduce", {"out": np.ones(11)}, "needs"),
    ("allreduce", {"out": np.ones(10, np.float32)}, "float32"),
]


@pytest.mark.parametrize("spoil, words", BAD_ARRAYS)
def test_a_bad_array_is_refused_on_the_rank_that_brings_it(comm, spoil, words):
    """Nobody else hears of it, and the call can be made again."""
    x = np.ones(1000)
    if RANK == ODD:
        with pytest.raises((ValueError, TypeError), match=words):
            collectives.allreduce(spoil(x), comm)
        with pytest.raises((ValueError, TypeError), match=words):
            collectives.plan("allreduce", spoil(x), comm)
    collectives.allreduce(x, comm)
    assert (x == P).all()


@pytest.mark.parametrize("kind, wrongly, words", BAD_WORDS)
def test_a_bad_argument_is_refused_on_the_rank_that_gives_it(comm, kind, wrongly, words):
    x = np.ones(10)
    if RANK == ODD:
        for call in (getattr(collectives, kind), lambda *given, **more: collectives.plan(kind, *given, **more)):
            with pytest.raises((ValueError, TypeError), match=words) as raised:
                call(x, comm, **wrongly)
            assert not isinstance(raised.value, collectives.CollectiveError)
            alone = raised.value.__suppress_context__ or raised.value.__context__ is None
            assert alone, "one traceback tells all"
    collectives.allreduce(x, comm)
    assert (x == P).all()


def test_a_read_only_array_serves_where_nothing_is_written(comm):
    x = np.ones(10)
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        collectives.allreduce(x, comm)
    out = np.empty(10)
    assert (collectives.allreduce(x, comm, out=out) == P).all()


@pytest.mark.mpi(min_size=2)
def test_the_sentence_names_who_calls_what():
    with fresh() as comm:
        said = sentence(lambda: collectives.allreduce(np.ones(4 + (RANK == ODD)), comm))
        assert f"rank {ODD} calls allreduce of 5 float64, sum" in said
        assert "allreduce of 4 float64" in said
        collectives.renew(comm)
        said = sentence(lambda: collectives.plan("allreduce", np.ones(10 + (RANK == ODD)), comm))
        assert f"rank {ODD} calls plan of allreduce of 11" in said
        collectives.renew(comm)
        still_works(comm)


@pytest.mark.mpi(min_size=2)
def test_long_texts_that_differ_at_their_end_are_told_apart():
    """What fits on a descriptor is alike: the whole texts are compared all the same."""
    with fresh() as comm:
        arrays = [np.ones(1 + i) for i in range(100)]
        if RANK == ODD:
            arrays[-1] = np.ones(7)
        sentence(lambda: collectives.grouped_allreduce(arrays, comm))
        collectives.renew(comm)
        arrays[-1] = np.ones(100)
        collectives.grouped_allreduce(arrays, comm)
        assert (arrays[-1] == P).all()


@only_on(2, 4)
@pytest.mark.parametrize("nodes", ["one node", "a node for each rank"])
def test_a_wait_warns_before_it_raises(nodes):
    with fresh(nodes) as comm:
        x, texts = np.ones(10), []
        collectives.allreduce(x, comm)
        patient(comm, 0.3, 30.0)

        def heard(message, *_):
            texts.append(str(message))
            WORLD.send(None, ODD)

        if RANK == ODD:
            for other in range(P - 1):
                WORLD.recv(source=other)
            collectives.allreduce(x, comm)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = heard
                collectives.allreduce(x, comm)
        assert (x == P * P).all()
        assert RANK == ODD or re.search(rf"has waited for .*: ranks? (\d+, )*{ODD} (has|have) not come", texts[0])


@only_on(2, 4)
def test_a_rank_that_is_late_for_the_first_call():
    """The others raise StallError with what to do. They may call again, and go on when it comes."""
    comm = WORLD.Dup()
    if RANK == ODD:
        for other in range(P - 1):
            WORLD.recv(source=other)
    else:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("MPIPS_STALL_SECONDS", "0.1")
            environment.setenv("MPIPS_TIMEOUT_SECONDS", "0.3")
            with (
                pytest.warns(RuntimeWarning) as warned,
                pytest.raises(StallError, match="pass a communicator of those"),
            ):
                collectives.allreduce(np.ones(10), comm)
        assert [Path(warning.filename).name for warning in warned] == ["test_faults.py"]
        WORLD.send(None, ODD)
    still_works(comm)
    comm.Free()


@only_on(2, 3)
def test_renewing_again_and_again(monkeypatch):
    """Also communicators that are well, and those that share no memory. Others are not touched."""
    with fresh() as other:
        for turn in range(4):
            if turn == 2:
                share_nothing(monkeypatch)
            with fresh() as comm:
                for fails in (True, False, True):
                    plan = collectives.plan("allreduce", np.ones(5), comm)
                    if fails:
                        sentence(lambda comm=comm: collectives.allreduce(np.ones(3 + RANK), comm))
                    collectives.renew(comm)
                    assert hear(plan).error in ("CollectiveError", "MismatchError"), "plans of the old one stay over"
                    still_works(comm)
        still_works(other)
