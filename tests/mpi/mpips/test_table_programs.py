"""Drawn programs of tables hold after every call what serial dictionaries of rows hold, bit for bit.

mpirun -n RANKS python -m tests.mpi.mpips.test_table_programs COUNT [FIRST]     so many seeds, from FIRST on
"""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
import traceback
from contextlib import ExitStack
from functools import partial
from unittest.mock import patch

import pytest

import mpips
from mpips.tables import eviction, index, places, rows
from mpips.tables import files as table_files
from tests.choice import first
from tests.mpi.mpips.support import WORLD, need, run
from tests.mpi.mpips.table_program import Player, options_of
from tests.mpi.sizes import either_mpi

KINDS = {"sync": ["dist_sync", "mpi_sync"], "async": ["dist_async", "mpi_async"]}
LIMIT_SECONDS = 60
SMALLER = [
    (index, "FIRST_SLOTS", 64),
    (index, "MOVED_AT_ONCE", 64),
    (places, "CLEARED_AT_ONCE", 16),
    (rows, "BLOCK_BYTES", 4096),
    (eviction, "SAMPLED", 2),
    (table_files, "PIECE_BYTES", 4096),
    (table_files, "LOADED_BYTES", 4096),
]
"""What is done in pieces, which few rows have one of."""


def play(seed: int, folder: str) -> None:
    """Play one program on all ranks; in a synchronous store it goes on with other servers, and so other workers."""
    chosen = random.Random(seed)
    kinds = KINDS[chosen.choice(["sync", "sync", "async"])]
    player, path = Player(seed, folder), f"{folder}/end"
    stores = [options_of(chosen, kinds) for _ in range(chosen.randint(1, 2) if "dist_sync" in kinds else 1)]
    stores.sort(key=lambda store: store[1]["servers"])  # who is a worker has been one from the beginning
    calls = [chosen.randint(10, 30) for _ in stores]

    def body(kv: mpips.KVStore, number: int) -> None:
        if number:
            kv.load(path)
        player.play(kv, calls[number])
        if number + 1 < len(stores):
            kv.save(path)

    with ExitStack() as stack:
        for module, name, size in SMALLER if chosen.random() < 0.5 else ():
            stack.enter_context(patch.object(module, name, size))
        for number, (kind, options) in enumerate(stores):
            run(kind, partial(body, number=number), **options)


@pytest.mark.core(3)
@either_mpi
@first(6, seed=range(30))
def test_tables_hold_what_serial_dictionaries_hold(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    need(servers=1)
    play(seed, WORLD.bcast(str(tmp_path_factory.mktemp("program"))))


def main(count: int, start: int = 0) -> None:
    """Play so many programs; the first that is wrong ends the job."""
    for seed in range(start, start + count):
        faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
        if WORLD.rank == 0:
            print(f"seed {seed}", flush=True)
        with tempfile.TemporaryDirectory() as made:
            try:
                play(seed, WORLD.bcast(made))
            except BaseException:
                traceback.print_exc()
                print(f"seed {seed} is wrong", flush=True)
                WORLD.Abort(1)
            WORLD.Barrier()
    if WORLD.rank == 0:
        print(f"{count} programs, from seed {start} on, hold", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
