"""Values that cannot be stored as they are meant: NaN in compressed pushes, one array for the results of two keys."""

import numpy as np
import pytest

import mpips
from tests.mpi.mpips.faults import workers
from tests.mpi.mpips.support import failure, need, run
from tests.mpi.sizes import only_on

PUSHES = {"2bit": np.nan, "1bit": np.inf, "fp16": -np.inf, "int": np.nan, "topk": np.nan}


@only_on(2, 3)
@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("name", PUSHES)
def test_no_number_is_said_and_stays_nowhere(name: str, rows: bool, servers: int) -> None:
    kind = "mpi_sync" if rows else "dist_sync"
    last = need(1, servers=servers) - 1

    def body(kv):
        values, said = np.zeros((4, 2), np.float32), []
        kv.init("w", values)
        kv.set_gradient_compression({"type": name} | ({"ratio": 1.0} if name == "topk" else {}))
        step = 0
        while step < 6:
            gradient = np.full((4, 2), 0.75, np.float32)
            if step == 2 and kv.rank == last:
                gradient[1, 1] = PUSHES[name]
            try:
                kv.push("w", mpips.RowSparse(np.arange(4), gradient, (4, 2)) if rows else gradient)
                kv.pull("w", values)
                step += 1
            except mpips.StoreError as error:
                said.append(str(error))
                step = kv.recover().step + 1  # without the step that could not be made
        return said, values

    made = run(kind, body, servers=servers)
    if made is not None:
        said, values = made
        every = workers(servers).allgather(said)
        assert said and all(f"pushes of key 'w' is {PUSHES[name]:g}, and" in one for one in said), said
        assert every == [said] * len(every), every
        assert np.ptp(values) == 0 and np.isfinite(values).all(), values


@only_on(2)
@pytest.mark.parametrize("servers", [0, 1])
def test_two_keys_never_share_an_out(servers: int) -> None:
    def body(kv):
        out, keys = np.zeros(2), ["a", "b"]
        kv.init(keys, [np.zeros(2), np.ones(2)])
        shared, own = [out, out], [np.zeros(2), np.zeros(2)]
        calls = (lambda: kv.pull(keys, shared), lambda: kv.pushpull(keys, own, out=shared))
        said = [failure(call) for call in calls]
        kv.pushpull(keys, own, own)
        return said

    said = run("dist_sync", body, servers=servers)
    assert said is None or all("keys 'a' and 'b' have one array as out" in one for one in said), said
