"""mpips: a parameter server with MPI inside its clients, after MXNET-MPI (arXiv:1801.03855).

    kv = mpips.create("mpi_sync")     # a server serves inside this call until the workers are done, and then exits
    kv.init("w", weights)
    kv.pushpull("w", gradient, out=total)

The public names are imported when they are first used, so that `mpips run` and `mpips doctor` start without MPI.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    # This check must come before all other imports, because older Pythons cannot parse the imported modules. With
    # SystemExit, `python -m mpips.x` prints the error message without a traceback.
    raise (SystemExit if sys.argv[:1] == ["-m"] else ImportError)(
        f"mpips needs Python 3.11 or newer, this is {sys.version.split()[0]}: install one, and make the environment "
        "with it (`python3.11 -m venv .venv`, in a clone `make PYTHON=python3.11`)"
    )

import importlib
from typing import TYPE_CHECKING, Any

from mpips.ending import end_job_on_error as _end_job_on_error
from mpips.ending import watch_process as _watch_process

if TYPE_CHECKING:
    from mpips import chaos, compression, optimizers, training
    from mpips.collectives.errors import CollectiveError, MismatchError, StallError
    from mpips.collectives.fabric.arena import empty
    from mpips.collectives.recorder.own import note
    from mpips.store.api import KVStore
    from mpips.store.create import create
    from mpips.store.keys.key import Rounds
    from mpips.store.keys.row_sparse import RowSparse
    from mpips.store.options import OptionError, Options
    from mpips.store.ranks import rank, size
    from mpips.store.runtime.errors import StoreError, StoreMismatchError, StoreStallError
    from mpips.tables.admission import chance, seen
    from mpips.tables.initial import constant, normal, register_init, truncated_normal, uniform
    from mpips.tables.table import Table, pull_rows
    from mpips.training.local import Elastic
    from mpips.training.model import Model
    from mpips.training.trainer import Trainer

__version__ = "0.1.0"

_watch_process()
if not getattr(sys.modules.get("collectives"), "opens_door", False):
    _end_job_on_error()

_HOMES = {
    "create": "mpips.store.create",
    "KVStore": "mpips.store.api",
    "Options": "mpips.store.options",
    "OptionError": "mpips.store.options",
    "RowSparse": "mpips.store.keys.row_sparse",
    "Rounds": "mpips.store.keys.key",
    "Trainer": "mpips.training.trainer",
    "Elastic": "mpips.training.local",
    "Model": "mpips.training.model",
    "empty": "mpips.collectives.fabric.arena",
    "note": "mpips.collectives.recorder.own",
    "CollectiveError": "mpips.collectives.errors",
    "MismatchError": "mpips.collectives.errors",
    "StallError": "mpips.collectives.errors",
    "StoreError": "mpips.store.runtime.errors",
    "StoreMismatchError": "mpips.store.runtime.errors",
    "StoreStallError": "mpips.store.runtime.errors",
    "Table": "mpips.tables.table",
    "pull_rows": "mpips.tables.table",
    "constant": "mpips.tables.initial",
    "normal": "mpips.tables.initial",
    "register_init": "mpips.tables.initial",
    "truncated_normal": "mpips.tables.initial",
    "uniform": "mpips.tables.initial",
    "seen": "mpips.tables.admission",
    "chance": "mpips.tables.admission",
    "rank": "mpips.store.ranks",
    "size": "mpips.store.ranks",
}
_PACKAGES = ("chaos", "compression", "optimizers", "training")

__all__ = [
    "CollectiveError",
    "Elastic",
    "StoreError",
    "StoreMismatchError",
    "StoreStallError",
    "KVStore",
    "MismatchError",
    "Model",
    "OptionError",
    "Options",
    "Rounds",
    "RowSparse",
    "StallError",
    "Table",
    "Trainer",
    "chance",
    "chaos",
    "compression",
    "constant",
    "create",
    "empty",
    "normal",
    "note",
    "optimizers",
    "pull_rows",
    "rank",
    "register_init",
    "seen",
    "size",
    "training",
    "truncated_normal",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mpips' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    _end_job_on_error()
    if name in _PACKAGES:
        return importlib.import_module(f"mpips.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
