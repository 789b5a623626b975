"""Between nodes, messages of one key are never taken for those of another, however many keys come and go."""

from __future__ import annotations

import numpy as np

from mpips.store.transport import pending as tags
from tests.mpi.mpips.support import TAG, failure, need, run, tells
from tests.mpi.sizes import only_on

OPTIONS = {"servers": 1, "shared_memory": False}
MOST = 4


def crossed(kv, first, second):
    """Rank 0 asks for `first`, then `second`; the server answers `second`, then `first`."""
    kv.pushpull([first, second], [np.zeros(1), np.zeros(1)])
    got = [np.zeros(1), np.zeros(1)]
    if kv.rank == 0:
        kv.push(first, np.full(1, 1.0))
        kv.push(second, np.full(1, 10.0))
        pulls = [kv.ipull(key, out) for key, out in zip((first, second), got)]
        for pull in pulls:
            pull.test()
        for rank in range(1, kv.num_workers):
            kv.layout.workers.Send(b"1", rank, TAG)
        for pull in pulls:
            pull.wait()
    else:
        tells(kv, [0])
        kv.push(second, np.full(1, 10.0))
        kv.pull(second, got[1])
        kv.push(first, np.full(1, 1.0))
        kv.pull(first, got[0])
    return got[0][0] == kv.num_workers and got[1][0] == 10 * kv.num_workers


@only_on(3, 4)
def test_tags_of_forgotten_keys_are_used_again_and_no_others(monkeypatch):
    need(2, **OPTIONS)
    monkeypatch.setattr(tags, "most_units", lambda: MOST)

    def body(kv):
        kv.init("kept", np.zeros(1))
        for turn in range(3 * MOST):
            name = f"key {turn}"
            kv.init(name, np.zeros(1))
            assert crossed(kv, "kept", name)
            kv.forget([name])

    run("dist_sync", body, **OPTIONS)


def test_more_keys_than_tags_are_refused_everywhere(monkeypatch):
    need(1, **OPTIONS)
    monkeypatch.setattr(tags, "most_units", lambda: MOST)

    def body(kv):
        kv.init("kept", np.zeros(1))
        names = [f"key {number}" for number in range(MOST)]
        said = kv.layout.workers.allgather(failure(lambda: kv.init(names, [np.zeros(1)] * MOST)))
        assert len(set(said)) == 1 and f"key {names[-1]!r}: this MPI has tags for {MOST} units" in said[0], said
        kv.init(names[1:], [np.zeros(1)] * (MOST - 1))
        values = [np.full(1, number + 1.0) for number in range(MOST)]
        kv.pushpull(["kept", *names[1:]], values)
        assert [value[0] for value in values] == [kv.num_workers * (number + 1.0) for number in range(MOST)]

    run("dist_sync", body, **OPTIONS)
