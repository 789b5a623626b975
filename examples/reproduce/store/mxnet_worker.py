"""One process of an MXNet 1.9.1 job, which `beside_mxnet` starts with the Python of MXNet's environment.

    python mxnet_worker.py SIZES REPEATS

SIZES are bytes, and REPEATS the number of repeats for each size, both separated by commas. The role comes from
DMLC_ROLE. A scheduler or a server serves in `import mxnet`. A worker times `dist_sync` push + pull of one key of each
size. Worker 0 prints a JSON list of {"bytes", "seconds": [one for each repeat], "idle": the share of the machine's
cores that was idle meanwhile}.
"""

import json
import sys
import time

import mxnet as mx  # type: ignore[import-not-found]  # a scheduler or server stays in here until the job ends


def processor() -> tuple[int, int]:
    """Return the (idle, all) ticks of the cores since the machine started.

    A copy of `examples.reproduce.cores.processor`, which MXNet's Python cannot import.
    """
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:]]
    return ticks[3] + ticks[4], sum(ticks)


def main() -> None:
    store = mx.kv.create("dist_sync")
    results = []
    sizes = [int(text) for text in sys.argv[1].split(",")]
    for key, (nbytes, repeats) in enumerate(zip(sizes, map(int, sys.argv[2].split(",")))):
        value = mx.nd.ones(nbytes // 4)
        out = mx.nd.zeros(nbytes // 4)
        store.init(key, value)
        store._barrier()
        seconds, before = [], processor()
        for _ in range(repeats):
            start = time.perf_counter()
            store.push(key, value)
            store.pull(key, out)
            out.wait_to_read()
            seconds.append(time.perf_counter() - start)
        # MXNet pulls into the pushed array as well, so its values double each time: nothing to compare.
        after = processor()
        idle = (after[0] - before[0]) / max(1, after[1] - before[1])
        results.append({"bytes": nbytes, "seconds": seconds, "idle": idle})
        store._barrier()
    if store.rank == 0:
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
