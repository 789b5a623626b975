"""Options are read once, checked, and told in one table."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mpips import OptionError, Options
from mpips.store.options import FIELDS, KINDS, check_kind, kind_of, read, table

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "options.md"


def test_arguments_win_over_variables_over_defaults():
    options = read({"servers": 2, "clients": None}, {"MPIPS_SERVERS": "1", "MPIPS_CLIENTS": "3", "HOME": "/"})
    assert (options.servers, options.clients, options.masters) == (2, 3, "one")


def test_an_option_travels_to_another_process():
    options = read({"servers": 2, "masters": "ALL", "shared_memory": False, "stall_seconds": 2}, {})
    assert read({}, options.environment()) == options
    assert Options().environment() == {}


@pytest.mark.parametrize(
    "values, words",
    [
        ({"servers": math.nan}, "servers=nan is not a whole number"),
        ({"servers": -1}, "servers=-1 is less than 0"),
        ({"clients": 0}, "clients=0 is less than 1"),
        ({"block_bytes": 10**30}, f"block_bytes={10**30} is more than {2**63 - 1}"),
        ({"clients": 1.5}, "clients=1.5 is not a whole number"),
        ({"stall_seconds": math.nan}, "stall_seconds=nan must be finite"),
        ({"timeout_seconds": math.inf}, "must be finite"),
        ({"masters": "two"}, "none of one, all"),
        ({"shared_memory": "perhaps"}, "not 0 or 1"),
        ({"server": 1}, r"no option 'server': did you mean servers\? known: servers"),
        ({"quorum": 0}, "quorum=0 closes no round: give a number of clients, at least 1"),
        ({"quorum": -2}, "quorum=-2 is less than -1"),
        ({"quorum": 2, "grace_seconds": -1}, "grace_seconds=-1.0 is less than 0"),
        ({"grace_seconds": 2}, "grace_seconds=2.0 is the time after a quorum, and there is none"),
        ({"quorum": 2, "grace_seconds": 300}, "grace_seconds=300.0 is not below timeout_seconds=300.0"),
        ({"quorum": 2, "staleness": 1}, "staleness=1 and quorum=2 are two ways"),
        ({"clients": 3, "workers": 2}, "clients=3 is more than workers=2: ask for fewer"),
    ],
)
def test_what_makes_no_sense_is_told(values, words):
    with pytest.raises(OptionError, match=words):
        read(values, {})


@pytest.mark.parametrize("name, value", [("servers", 1), ("workers", 2), ("clients", 2)])
def test_one_process_alone_has_no_others(name, value):
    with pytest.raises(OptionError, match=f"{name}={value} in a store of kind local, .* dist_sync"):
        check_kind("local", {name: value})
    check_kind("local", {"servers": None, "workers": 1, "clients": 1, "stall_seconds": 3})


def test_staleness_is_of_asynchronous_stores():
    for kind in KINDS:
        check_kind(kind, {"staleness": -1})
        if kind.endswith("_async"):
            check_kind(kind, {"staleness": 2})
        else:
            with pytest.raises(OptionError, match=f"staleness=2 in a store of kind {kind}.* ask for dist_async"):
                check_kind(kind, {"staleness": 2})


def test_a_quorum_is_of_asynchronous_stores_and_of_clients_that_are_there():
    for kind in KINDS:
        if kind.endswith("_async"):
            check_kind(kind, {"quorum": 2})
        else:
            with pytest.raises(OptionError, match=f"quorum=2 in a store of kind {kind}, whose rounds take all clients"):
                check_kind(kind, {"quorum": 2})
    assert Options(servers=1, quorum=3).clients_of("dist_async", 4) == 3
    with pytest.raises(OptionError, match="quorum=3 is more than the 2 clients of this mpi_async store: a round would"):
        Options(servers=1, clients=2, quorum=3).clients_of("mpi_async", 5)


def test_a_bad_variable_is_named():
    with pytest.raises(OptionError, match="MPIPS_SERVERS='many'"):
        read({}, {"MPIPS_SERVERS": "many"})
    with pytest.raises(OptionError, match=r"MPIPS_SERVER is unknown: did you mean MPIPS_SERVERS\? known: M"):
        read({}, {"MPIPS_SERVER": "1"})
    with pytest.raises(OptionError, match="MPIPS_Q is unknown; known: MPIPS_SERVERS"):
        read({}, {"MPIPS_Q": "1"})
    with pytest.raises(OptionError, match=r"MPIPS_KERNEL is unknown: did you mean MPIPS_KERNELS\?"):
        read({}, {"MPIPS_KERNEL": "numpy"})
    with pytest.raises(OptionError, match="MPIPS_KERNELS='cuda' is unknown: give numba or numpy, or leave it"):
        read({}, {"MPIPS_KERNELS": "cuda"})
    assert read({}, {"MPIPS_KERNELS": "numpy", "MPIPS_KERNELS_FOLDER": "/tmp/kernels"}) == Options()


def test_roles_need_ranks():
    assert Options(servers=2).workers_of(7) == 5
    assert Options(servers=1, clients=2).clients_of("mpi_sync", 4) == 2
    assert Options(servers=1, clients=2).clients_of("dist_sync", 4) == 3
    with pytest.raises(OptionError, match="need 3 ranks, but the job has 2"):
        Options(servers=2).workers_of(2)
    with pytest.raises(OptionError, match="more than the 2 workers of the job: ask for fewer"):
        Options(servers=1, clients=3).clients_of("mpi_sync", 3)
    said = r"kind dist_async needs a server \(servers=0\).*: start .* `mpips run --servers 1`, or ask for dist_sync"
    with pytest.raises(OptionError, match=said):
        Options().clients_of("dist_async", 3)
    with pytest.raises(OptionError, match=r"need 5 ranks, but the job has 3: .*--workers 4` or mpirun -n 5"):
        Options(servers=1, workers=4).workers_of(3)


def test_kinds_in_any_case_and_in_the_words_of_the_paper():
    assert [kind_of(kind.upper()) for kind in KINDS] == list(KINDS)
    assert kind_of("Synchronous-MPI") == "mpi_sync"
    assert kind_of("asynchronous-mpi") == "mpi_async"
    with pytest.raises(OptionError, match="known: local, dist_sync"):
        kind_of("dist")
    with pytest.raises(TypeError, match="is a string"):
        kind_of(1)


def test_the_documentation_holds_the_table():
    assert table() in DOCS.read_text()
    assert len(table().splitlines()) == len(FIELDS) + 2
