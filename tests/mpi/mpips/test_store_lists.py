"""Lists of keys: every key gets what it would get alone, in whatever order workers name them."""

import numpy as np
import pytest

import mpips
from tests.choice import pairwise
from tests.mpi.mpips.support import failure, need, run

SIZES = [1, 7, 1000, 5000, 20_000]  # one block and several, copied and read in place
MAKERS = {
    "ordinary": lambda size, index: np.empty(size),
    "empty": lambda size, index: mpips.empty(size, np.float64),
    "mixed": lambda size, index: mpips.empty(size, np.float64) if index % 2 else np.empty(size),
}
OPTIONS = {"block_bytes": 8192, "big_array": 10_000, "small_bytes": 1024}


def made(arrays):
    return [MAKERS[arrays](size, index) for index, size in enumerate(SIZES)]


def pushed(index, worker, round_):
    """Elements of which the sums are exact."""
    return np.arange(SIZES[index], dtype=np.float64) % 100 * (worker + 1) + 10 * index + round_


def summed(index, workers, round_):
    return sum(pushed(index, worker, round_) for worker in range(workers))


def exchanged(kv, names, values, outs, how):
    if how == "push, pull":
        kv.push(names, values)
        for value in values:
            value[:] = -1
        kv.pull(names, outs)
    elif how == "pushpull":
        kv.pushpull(names, values, out=outs)
    else:
        kv.pushpull(names, values)
        for out, value in zip(outs, values):
            out[:] = value


@pytest.mark.mpi(min_size=2)
@pairwise(servers=[0, 1, 2], arrays=MAKERS, how=["push, pull", "pushpull", "in place"])
def test_every_key_of_a_list_has_its_sum(servers, arrays, how):
    workers = need(servers=servers)

    def body(kv):
        kv.init(list(range(len(SIZES))), [np.zeros(size) for size in SIZES])
        values, outs, wrong = made(arrays), made(arrays), []
        # without servers the workers call collectives, of one order
        order = np.roll(np.arange(len(SIZES)), kv.rank if servers else 0).tolist()
        for round_ in range(6):
            for index in order:
                values[index][:] = pushed(index, kv.rank, round_)
            kind = tuple if round_ % 2 else list
            exchanged(kv, kind(order), kind(values[i] for i in order), kind(outs[i] for i in order), how)
            wrong += [(round_, i) for i in order if not np.array_equal(outs[i], summed(i, workers, round_))]
        return wrong

    assert not run("dist_sync", body, servers=servers, **OPTIONS)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("arrays", MAKERS)
def test_the_result_of_one_key_goes_where_another_was_pushed_from(arrays):
    workers = need(servers=1)

    def body(kv):
        kv.init(["a", "b"], [np.zeros(20_000)] * 2)
        wrong = []
        for round_ in range(6):
            x, y = (MAKERS[arrays](20_000, index) for index in range(2))
            x[:], y[:] = kv.rank + 1, 10 * (kv.rank + 1) + round_
            kv.pushpull(["a", "b"], [x, y], out=[y, x])
            total = workers * (workers + 1) / 2
            if not ((y == total).all() and (x == 10 * total + workers * round_).all()):
                wrong.append((round_, x[0], y[0]))
        return wrong

    assert not run("dist_sync", body, servers=1, **OPTIONS)


@pytest.mark.mpi(min_size=2)
def test_a_list_with_one_array_that_does_not_fit_pushes_nothing():
    need(servers=1)

    def body(kv):
        kv.init(["a", "b"], [np.full(3, 5.0)] * 2)
        said = failure(lambda: kv.push(["a", "b"], [np.ones(3), np.ones(4)]))
        outs = [np.zeros(3), np.zeros(3)]
        kv.pull(["a", "b"], outs)
        locked = np.zeros(3)
        locked.flags.writeable = False
        unread = failure(lambda: kv.pull(["a", "b"], [np.zeros(3), locked]))
        return said, unread, [out.tolist() for out in outs]

    result = run("dist_sync", body, servers=1)
    if result:
        said, unread, outs = result
        assert "key 'b'" in said and "float64(4,)" in said, said
        assert "read-only" in unread, unread
        assert outs == [[5.0] * 3] * 2


@pytest.mark.mpi(min_size=3)
def test_one_array_for_two_keys_is_read_for_both_before_it_is_written():
    workers = need(2, servers=1)
    size = 100_000

    def body(kv):
        kv.init(["a", "b"], [np.zeros(size, np.float32)] * 2)
        x, y, outs, wrong = mpips.empty(size), mpips.empty(size), [np.zeros(size, np.float32) for _ in range(2)], []
        for round_ in range(20):
            x[:], y[:] = 1, 1
            if kv.rank == 0:
                kv.pushpull(["a", "b"], [x, x])
            else:
                kv.push("a", x)
                kv.push("b", y)
                kv.pull(["a", "b"], outs)
                wrong += [(round_, out.max()) for out in outs if not (out == workers).all()]
        return wrong

    assert not run("dist_sync", body, servers=1)
