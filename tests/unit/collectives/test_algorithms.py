"""Every algorithm proved for every p it takes, and executed on numbers of odd sizes."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.schedule import bcube
from collectives.schedule.catalog import build, names, parse, serves
from collectives.schedule.model import KINDS, cut
from collectives.schedule.proof import check
from tests.choice import first
from tests.unit.collectives.play import play

P = range(1, 65)
SINGLE = [(kind, name) for kind in KINDS for name in names(kind) if name != "hierarchical"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), SINGLE)
def test_proved_for_1_to_64_ranks(kind, name):
    proved = 0
    for p in P:
        if not serves(kind, name, p):
            for root in {0, p // 2, p - 1} if kind in ("broadcast", "reduce") else {0}:
                check(build(kind, name, p, root=root))
            proved += 1
    no_large_factor = sum(
        all(p % prime for prime in (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)) for p in P
    )
    assert proved == {"bcube": 11, "halving_doubling": 64 if kind == "allreduce" else no_large_factor}.get(name, 64)


@pytest.mark.slow
@pytest.mark.parametrize("between", ["ring", "halving_doubling", "multi_ring", "direct", "bcube"])
def test_hierarchical_proved_for_nodes_of_every_size(between):
    """Up to 16 ranks also in one node, and in nodes of one rank, which leaves one of the two levels alone."""
    for p in P:
        for local in (local for local in range(1, p + 1) if p % local == 0 and (p <= 16 or 1 < local < p)):
            if not serves("allreduce", between, p // local):
                check(build("allreduce", "hierarchical", p, local=local, between=between))


@pytest.mark.parametrize("depth", [2, 3])
def test_a_deeper_bcube_is_proved_and_has_its_lanes(depth):
    schedule = build("allreduce", f"bcube(n=3,k=2,depth={depth})", 9)
    check(schedule)
    assert schedule.name == f"bcube(n=3,k=2,depth={depth})"
    assert len(schedule.lanes) == 2 * depth


@pytest.mark.slow
@first(4, **{"n, k": [(2, 10), (3, 6), (4, 5), (65, 1), (8, 4), (16, 3), (64, 2)]})
def test_bcube_proved_up_to_4096_ranks(n, k):
    check(build("allreduce", "bcube", n**k, n=n, k=k))


@pytest.mark.parametrize("rings", [1, 3, 4])
def test_multi_ring_proved_for_other_numbers_of_rings(rings):
    for p in (1, 2, 7, 16):
        check(build("allreduce", f"multi_ring(rings={rings})", p))


@pytest.mark.parametrize("radices", [(2, 3), (5, 1, 2), (2, 2, 4), (3, 4, 5)])
def test_the_exchange_over_digits_of_unlike_sizes_is_proved(radices):
    for lanes in (1, len(radices)):
        check(bcube.over("allreduce", radices, lanes, "digits"))
    check(bcube.over("reduce_scatter", radices, 1, "digits"))


def promised(kind, vectors, root, rank):
    """(place, values) that the collective promises to a rank."""
    p, n = len(vectors), len(vectors[0])
    block = [slice(cut(n, p, i), cut(n, p, i + 1)) for i in range(p)]
    total = sum(vectors)
    if kind == "reduce_scatter":
        return block[rank], total[block[rank]]
    if kind == "allgather":
        return slice(None), np.concatenate([vectors[i][block[i]] for i in range(p)])
    if kind == "alltoall":
        return slice(None), np.concatenate([vectors[i][block[rank]] for i in range(p)])
    if kind == "broadcast":
        return slice(None), vectors[root]
    if kind == "reduce" and rank != root:
        return slice(0), total[:0]
    return slice(None), total


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data(), p=st.integers(1, 9), n=st.integers(0, 40))
def test_numbers_of_any_size_come_out_right(data, p, n):
    kind, name = data.draw(st.sampled_from([pair for pair in SINGLE if not serves(*pair, p)]))
    root = data.draw(st.integers(0, p - 1))
    if kind == "alltoall":
        n *= p
    vectors = [np.arange(n) * 100 + rank for rank in range(p)]
    out = play(build(kind, name, p, root=root), vectors)
    for rank in range(p):
        place, values = promised(kind, vectors, root, rank)
        np.testing.assert_array_equal(out[rank][place], values)


@pytest.mark.parametrize("name", [*names("allreduce")])
@pytest.mark.parametrize("p", [4, 9])
def test_all_ranks_get_the_same_bits(name, p):
    parameters = {"local": p // 2 if p == 4 else 3} if name == "hierarchical" else {}
    rng = np.random.default_rng(p)
    vectors = [(rng.standard_normal(50) * 10.0 ** rng.integers(-6, 6, 50)).astype(np.float32) for _ in range(p)]
    out = play(build("allreduce", name, p, **parameters), vectors)
    assert len({vector.tobytes() for vector in out}) == 1


def test_bml_takes_the_levels_in_the_order_of_the_paper():
    """Section 3.2: in step w, thread t uses level (w + t) mod k; the broadcast goes back."""
    program = build("allreduce", "bcube", 27, n=3, k=3).program(0)
    level = {1: 0, 2: 0, 3: 1, 6: 1, 9: 2, 18: 2}
    for t, steps in enumerate(program):
        taken = [{level[r.send_to] for r in step.rounds} for step in steps]
        there = [{(w + t) % 3} for w in range(3)]
        assert taken == there + there[::-1]


def test_bml_sends_the_pieces_of_figure_4():
    """In BCube(3,2) a host sends 3 pieces to each neighbour in the first step and 1 in the second, of 9 a thread."""
    for steps in build("allreduce", "bcube", 9).program(0):
        sizes = [{r.send.stop - r.send.start for r in step.rounds} for step in steps]
        assert sizes == [{3}, {1}, {1}, {3}]


@pytest.mark.parametrize(
    ("kind", "algorithm", "p", "sentence"),
    [
        ("allreduce", "bcube", 6, "bcube needs p = n\\^k ranks"),
        ("allreduce", "bcube(n=3,k=2)", 8, r"is for 3\^2 ranks, not for 8"),
        ("allreduce", "bcube(n=2,k=2,depth=0)", 4, "depth of 1 to 1024"),
        ("allreduce", "rong", 4, "choose one of ring, multi_ring"),
        ("alltoall", "ring", 4, "'ring' does not serve alltoall: choose one of direct"),
        ("gather", "ring", 4, "unknown collective 'gather'"),
        ("allreduce", "bcube(n=2,k=99999999999)", 4, r"2\^99999999999 ranks"),
        ("allreduce", "bcube(n=2,k=2,depth=99999999999)", 4, "depth of 1 to 1024"),
        ("allreduce", "multi_ring(rings=0)", 4, "1 to 1024 rings"),
        ("allreduce", "multi_ring(rings=99999999999)", 4, "1 to 1024 rings"),
        ("allreduce", "multi_ring(lanes=2)", 4, "no parameter 'lanes': it takes rings"),
        ("allreduce", "multi_ring(rings=two)", 4, "must be a whole number"),
        ("allreduce", "hierarchical(local=3)", 4, "must divide them"),
        ("allreduce", "hierarchical", 4, "must divide them"),
        ("allreduce", "ring(", 4, "is not written as"),
        ("reduce_scatter", "halving_doubling", 22, "without a prime factor above 7, not on 22"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_way_out(kind, algorithm, p, sentence):
    with pytest.raises(ValueError, match=sentence):
        build(kind, algorithm, p)


def test_names_carry_parameters():
    assert parse("hierarchical(local=4, between=ring)") == ("hierarchical", {"local": 4, "between": "ring"})
    assert parse("ring") == ("ring", {})
    assert build("allreduce", "bcube(n=2,k=4)", 16).name == "bcube(n=2,k=4)"
    assert build("allreduce", "bcube(n=16)", 16).name == "bcube(n=16,k=1)"


def test_the_example_of_the_docs_is_an_algorithm():
    """The file that docs/how-to/add-an-algorithm.md shows, named in the catalogue for the moment."""
    text = (Path(__file__).parents[3] / "docs" / "how-to" / "add-an-algorithm.md").read_text(encoding="utf-8")
    star = ModuleType("star")
    exec(text.split("```python\n")[1].split("```")[0], star.__dict__)
    for p in (1, 2, 3, 8, 70):
        schedule = star.build("allreduce", p)
        check(schedule)
        vectors = [np.arange(10) + rank for rank in range(p)]
        assert all((held == sum(vectors)).all() for held in play(schedule, vectors))
