"""`mpips.pull_rows` returns for several tables the bits that a pull of each returns, and asks each server once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpips
from collectives.kernels import engine
from mpips.store.remote.link import ServerLink
from tests.mpi.mpips.reference_table import ReferenceTable
from tests.mpi.mpips.support import failure, meet, need, run
from tests.mpi.sizes import either_mpi

# name of a table -> dim, dtype, optimizer; rows of 4, 12, 40 and 128 bytes do not fit into one another
TABLES = {
    "users": (3, "float32", "row_adagrad"),
    "items": (5, "float64", "adam"),
    "tags": (32, "float32", "adagrad"),
    "bias": (1, "float32", "sgd"),
}
EDGES = np.array([0, -1, 1, 2**63 - 1, -(2**63)])
WAYS = [
    ("dist_sync", {"servers": 1}),
    ("dist_sync", {"servers": 2}),
    ("dist_sync", {"servers": 2, "shared_memory": False}),
    ("dist_sync", {"servers": 3, "shared_memory": False}),
    ("mpi_sync", {"servers": 1, "clients": 1}),
]


def ids_of(name: str, step: int, worker: int) -> Any:
    """Ids with repeats; other workers name other numbers of ids, and in some steps a worker names none."""
    random = np.random.default_rng([len(name), step, worker])
    shape = (0,) if (step + worker + len(name)) % 4 == 0 else (worker + 1, 7)
    return random.integers(-15, 15, shape) * np.where(random.random(shape) < 0.5, 1, 10**15)


def tables_of(kv: mpips.KVStore) -> dict[str, mpips.Table]:
    return {
        name: kv.table(name, dim, dtype, mpips.uniform(0.5), optimizer, learning_rate=0.1)
        for name, (dim, dtype, optimizer) in TABLES.items()
    }


def check_steps(kv: mpips.KVStore, tables: dict[str, mpips.Table], models: dict[str, ReferenceTable]) -> None:
    """Push to every table in each step, and compare the rows of all tables with those of the dictionaries."""
    for step in range(6):
        for name, table in tables.items():
            pushed = [ids_of(name, step, worker) for worker in range(kv.num_workers)]
            gradients = [np.sin(np.arange(ids.size * table.dim)).astype(table.dtype) for ids in pushed]
            batches = [(ids, some.reshape(*ids.shape, table.dim)) for ids, some in zip(pushed, gradients)]
            models[name].push(batches)
            table.push(*batches[kv.rank])
        wanted = {table: ids_of(name, step + 1, kv.rank) for name, table in tables.items()}
        wanted[tables["bias"]] = EDGES
        for given in (wanted, {tables["tags"]: EDGES}, dict(list(wanted.items())[step % 3 : step % 3 + 2])):
            found = mpips.pull_rows(given)
            assert [*found] == [*given]
            for table, ids in given.items():
                assert found[table].shape == (*ids.shape, table.dim) and found[table].dtype == table.dtype
                assert found[table].tobytes() == models[table.name].pull(ids).tobytes(), (step, table)


@either_mpi
@pytest.mark.parametrize("kind, options", WAYS)
def test_rows_of_several_tables_are_those_of_dictionaries(kind: str, options: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        tables = tables_of(kv)
        models = {name: ReferenceTable(name, dim, dtype, 0.5, way) for name, (dim, dtype, way) in TABLES.items()}
        check_steps(kv, tables, models)
        engine.load_all()
        # From now on workers read rows in the memory of servers of this node.
        check_steps(kv, tables, models)

    run(kind, body, **options)


@either_mpi
@pytest.mark.parametrize(
    "kind, options",
    [
        ("dist_async", {"servers": 1}),
        ("dist_async", {"servers": 2, "staleness": 0}),
        ("dist_async", {"servers": 2, "staleness": 1, "shared_memory": False}),
        ("mpi_async", {"servers": 1, "clients": 1}),
    ],
)
def test_an_asynchronous_pull_has_this_workers_own_pushes(kind: str, options: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        tables = [kv.table(f"t{number}", number + 1, init=mpips.uniform(0), learning_rate=1.0) for number in range(3)]
        ids = np.array([7, -kv.rank - 1])
        for step in range(1, 6):
            for table in tables:
                table.push(ids, np.full((2, table.dim), -1, np.float32))
            for rows in mpips.pull_rows(dict.fromkeys(tables, ids)).values():
                assert (rows[1] == step).all() and (rows[0] >= step).all()
        kv.barrier()
        meet(kv)
        for rows in mpips.pull_rows(dict.fromkeys(tables, ids)).values():
            assert (rows[0] == 5 * kv.num_workers).all()
        # Some servers are asked for rows of one of the tables alone.
        for some in (tables, tables[::-1]):
            rows = mpips.pull_rows({some[0]: ids[:0], some[1]: ids[:1], some[2]: np.arange(2, 30)})
            assert [*map(len, rows.values())] == [0, 1, 28]
            assert (rows[some[1]] == 5 * kv.num_workers).all()
            expected = np.where(np.arange(2, 30) == 7, 5 * kv.num_workers, 0)
            assert (rows[some[2]] == expected[:, None]).all()

    run(kind, body, **options)


@pytest.mark.parametrize(
    "kind, options",
    [("dist_sync", {"servers": 2, "shared_memory": False}), ("dist_async", {"servers": 2, "staleness": 1})],
)
def test_each_server_gets_one_message(monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]) -> None:
    """In these stores workers do not read in the memory of servers."""
    need(**options)
    sent: list[int] = []
    post = ServerLink.post_request_with

    def counted(link: ServerLink, server: int, body: Any, rows: int) -> int:
        sent.append(server)
        return post(link, server, body, rows)

    def body(kv: mpips.KVStore) -> None:
        tables, ids = [kv.table(f"t{number}", 4) for number in range(26)], np.arange(9)
        monkeypatch.setattr(ServerLink, "post_request_with", counted)
        expected = [table.pull(ids).tobytes() for table in tables]
        assert sent == [0, 1] * 26
        sent.clear()
        assert [rows.tobytes() for rows in mpips.pull_rows(dict.fromkeys(tables, ids)).values()] == expected
        assert sent == [0, 1]

    run(kind, body, **options)


def test_bad_arguments_are_refused_by_a_sentence() -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        table, ids = kv.table("t", 2), np.arange(3)
        other = mpips.create("dist_sync", servers=1)
        elsewhere = other.table("u", 2)
        calls: dict[str, Any] = {
            "tables 't' and 'u' belong to different stores: make one call for each": {table: ids, elsewhere: ids},
            "'t' is not a table: give tables that kv.table": {"t": ids},
            "ids are a list: give a dict of tables": [(table, ids)],
            "pull_rows of table 't': ids have dtype float64, and need int64": {table: ids.astype(float)},
            "pull_rows of table 't': ids are of type list: pass numpy.array": {table: [1, 2]},
        }
        for expected, given in calls.items():
            said = failure(lambda: mpips.pull_rows(given))  # noqa: B023
            assert expected in said, said
        assert mpips.pull_rows({}) == {}
        assert mpips.pull_rows({elsewhere: ids})[elsewhere].shape == (3, 2)
        other.close()
        assert "closed" in failure(lambda: mpips.pull_rows({elsewhere: ids}))

    run("dist_sync", body, servers=1)


def test_more_rows_than_a_message_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    need(servers=1)
    monkeypatch.setattr("mpips.tables.table.MOST_BYTES", 100)

    def body(kv: mpips.KVStore) -> None:
        tables = [kv.table(name, 2) for name in "tu"]
        assert len(mpips.pull_rows(dict.fromkeys(tables, np.arange(6)))) == 2
        said = failure(lambda: mpips.pull_rows(dict.fromkeys(tables, np.arange(7))))
        assert "the rows of these 2 tables are 112 bytes, and one call takes at most 100" in said, said

    run("dist_sync", body, servers=1)
