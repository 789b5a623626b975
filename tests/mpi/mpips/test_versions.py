"""Versioned reads: a pull says at which version `out` is now, and leaves it alone where nothing has changed."""

import numpy as np
import pytest

from tests.choice import once
from tests.mpi.mpips.support import failure, need, run

ROUNDS = 40
APART = {"shared_memory": False}
STORES = [
    ("dist_sync", {}),
    ("mpi_sync", {}),
    ("mpi_sync", {"servers": 1}),
    ("dist_sync", {"servers": 1}),
    ("dist_sync", {"servers": 2}),
    ("mpi_sync", {"servers": 1, "masters": "all", **APART}),
    ("dist_async", {"servers": 1}),
    ("dist_async", {"servers": 2}),
    ("dist_async", {"servers": 1, **APART}),
]


@pytest.mark.mpi(min_size=3)
@once(**{"kind, options": STORES}, size=[0, 5, 100_000])
def test_pull_tells_whether_anything_is_newer(kind, options, size):
    workers = need(1, **options)

    def body(kv):
        kv.init(["a", "b"], [np.zeros(size, np.float32)] * 2)
        kv.set_optimizer("add")
        out = [np.full(size, np.nan, np.float32) for _ in range(2)]
        versions = kv.pull(["a", "b"], out, newer_than=[-1, -1])
        began = versions == [0, 0] and not any(one.any() for one in out)
        kv.barrier()
        kv.push("a", np.ones(size, np.float32))
        kv.barrier()
        each = workers if kv.layout.asynchronous and kv.layout.num_servers else 1
        versions = kv.pull(["a", "b"], out, newer_than=versions)
        grown = versions == [each, 0] and (out[0] == workers).all() and (out[1] == 0).all()
        out[0][:] = 7
        same = kv.pull("a", out[0], newer_than=each) == each and (out[0] == 7).all()
        older = kv.pull("a", out[0], newer_than=0) == each and (out[0] == workers).all()
        kv.barrier()
        return bool(began), bool(grown), bool(same), bool(older)

    result = run(kind, body, **options)
    assert result is None or all(result), result


@pytest.mark.mpi(min_size=3)
@once(
    learners=[1, 2],
    size=[3, 50_000, 400_000],
    options=[
        {"servers": 1},
        {"servers": 2},
        {"servers": 1, **APART},
        {"servers": 2, **APART},
        {"servers": 1, "block_bytes": 65_536},
    ],
)
def test_actors_never_read_a_torn_value(learners, size, options):
    need(learners + 1, **options)

    def body(kv):
        kv.init("w", np.zeros(size, np.float32))
        kv.set_optimizer("add")
        kv.barrier()
        wrong = []
        if kv.rank < learners:
            one = np.ones(size, np.float32)
            for _ in range(ROUNDS):
                kv.push("w", one)
        else:
            out, version = np.empty(size, np.float32), -1
            while version < learners * ROUNDS:
                now = kv.pull("w", out, newer_than=version)
                if now < version or not (out == now).all():
                    wrong.append((version, now, float(out.min()), float(out.max())))
                version = now
        kv.barrier()
        return wrong

    assert not run("dist_async", body, **options)


@pytest.mark.mpi(min_size=2)
def test_load_and_recover_make_the_next_read_new(tmp_path):
    def body(kv):
        path = kv.layout.workers.bcast(str(tmp_path / "w.safetensors"))
        kv.init("w", np.zeros(9))
        kv.set_optimizer("add")
        out = np.zeros(9)
        kv.save(path)
        kv.push("w", np.ones(9))
        version = kv.pull("w", out, newer_than=-1)
        kv.load(path)
        again = kv.pull("w", out, newer_than=version)
        loaded = again == version and not out.any()
        kv.barrier()
        kv.recover()
        out[:] = 7
        return loaded and kv.pull("w", out, newer_than=version) == version and not out.any()

    assert run("dist_sync", body, servers=1) in (None, True)


@pytest.mark.mpi(min_size=2)
def test_wrong_versions_are_refused():
    def body(kv):
        kv.init(["a", "b"], [np.zeros(3)] * 2)
        out = [np.zeros(3), np.zeros(3)]
        said = [
            failure(lambda: kv.pull("a", out[0], newer_than=0.5)),
            failure(lambda: kv.pull("a", out[0], newer_than=True)),
            failure(lambda: kv.pull("a", out[0], newer_than=-2)),
            failure(lambda: kv.pull(["a", "b"], out, newer_than=[0])),
            failure(lambda: kv.pull(["a", "b"], out, newer_than=0)),
            failure(lambda: kv.pull("c", out[0], newer_than=0)),
        ]
        kv.barrier()
        return said

    said = run("dist_sync", body, servers=1)
    for sentence, part in zip(
        said or (),
        [
            "newer_than=0.5 of key 'a' is no int",
            "newer_than=True of key 'a'",
            "newer_than=-2 of key 'a' is no version",
            "for a list of 2 keys",
            "newer_than=0 for a list of 2 keys",
            "key 'c' was not initialised",
        ],
    ):
        assert part in sentence, said


@pytest.mark.mpi(min_size=3)
def test_members_that_pull_together_are_refused():
    need(2, servers=1)

    def body(kv):
        kv.init("w", np.zeros(3))
        said = failure(lambda: kv.pull("w", np.zeros(3), newer_than=-1))
        kv.barrier()
        return said

    said = run("mpi_async", body, servers=1)
    assert said is None or "workers of a client pull together: choose dist_async" in said
