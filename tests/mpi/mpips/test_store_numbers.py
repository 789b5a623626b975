"""Values that are no numbers, in compressed pushes: said on all ranks with key and rank, and kept nowhere."""

import numpy as np
import pytest

import mpips
from tests.mpi.mpips.faults import workers
from tests.mpi.mpips.support import need, run
from tests.mpi.sizes import only_on

PUSHES = {"2bit": np.nan, "1bit": np.inf, "fp16": -np.inf, "topk": np.nan}


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
            except mpips.EpochError as error:
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
