"""A pull from an asynchronous store gets a value as one update or another left it, whatever is pushed meanwhile."""

import numpy as np
import pytest

import mpips
from tests.choice import once
from tests.mpi.mpips.support import need, run

ROUNDS, READS = 25, 3
SIZES = [3, 5000, 200_000]  # the last one takes a while to be updated, and to be read


@pytest.mark.mpi(min_size=3)
@once(
    make=[np.empty, mpips.empty],
    small_bytes=[0, 32_768],
    **{
        "kind, options": [
            ("dist_async", {"servers": 1}),
            ("dist_async", {"servers": 1, "block_bytes": 65_536}),
            ("dist_async", {"servers": 1, "staleness": ROUNDS}),
            ("mpi_async", {"servers": 1, "clients": 2}),
        ]
    },
)
def test_every_element_is_of_the_same_update(kind, options, small_bytes, make):
    workers = need(2, **options)

    def body(kv):
        names = list(range(len(SIZES)))
        kv.init(names, [np.zeros(size, np.float32) for size in SIZES])
        kv.set_optimizer("add")
        values, outs = ([make(size, np.float32) for size in SIZES] for _ in range(2))
        torn, before = [], [0.0] * len(SIZES)
        for value in values:
            value[:] = 1
        for round_ in range(ROUNDS):
            for name in names:
                kv.push(name, values[name])
                for _ in range(READS):
                    kv.pull(name, outs[name])
                    low, high = outs[name].min(), outs[name].max()
                    if low != high or low < max(before[name], round_ + 1):
                        torn.append((round_, name, low, high))
                    before[name] = high
        kv.barrier()
        kv.pull(names, outs)
        return torn, [set(out.tolist()) == {workers * ROUNDS} for out in outs]

    result = run(kind, body, small_bytes=small_bytes, **options)
    if result:
        torn, ended = result
        assert not torn and all(ended), (torn[:5], ended)
