"""Collectives over arrays, over messages or shared memory. Schedules are data that can be proved and simulated.

The public names are loaded at their first use. Importing mpi4py starts MPI, which a launcher must not do. The modules
about schedules, costs and topologies do not need MPI.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036
    # This check comes before the imports of our own modules, because older Pythons cannot parse them. SystemExit makes
    # `python -m collectives.x` print the message without a traceback.
    raise (SystemExit if sys.argv[:1] == ["-m"] else ImportError)(
        f"mpips needs Python 3.11 or newer, this is {sys.version.split()[0]}: install one, and make the environment "
        "with it (`python3.11 -m venv .venv`, in a clone `make PYTHON=python3.11`)"
    )

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpips.collectives.api import (
        allgather,
        allreduce,
        alltoall,
        broadcast,
        grouped_allreduce,
        reduce,
        reduce_scatter,
    )
    from mpips.collectives.communicator import renew
    from mpips.collectives.errors import CollectiveError, MismatchError, StallError
    from mpips.collectives.fabric.arena import empty
    from mpips.collectives.plan import Plan, plan

__all__ = [
    "allreduce",
    "reduce_scatter",
    "allgather",
    "broadcast",
    "reduce",
    "alltoall",
    "grouped_allreduce",
    "plan",
    "Plan",
    "empty",
    "renew",
    "CollectiveError",
    "MismatchError",
    "StallError",
]

# public name -> the module that defines it, if that is not `api`
_HOMES = {
    "plan": "plan",
    "Plan": "plan",
    "empty": "fabric.arena",
    "renew": "communicator",
    "CollectiveError": "errors",
    "MismatchError": "errors",
    "StallError": "errors",
}


class _Package(ModuleType):
    """The module type of this package. It imports public names on demand.

    `collectives.plan` is both a module and a public function. When Python imports the submodule it sets the attribute
    `plan` of the package. `__setattr__` ignores that assignment, so the name always stands for the function.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'collectives' has no attribute {name!r}", name=name, obj=self)
        try:
            value = getattr(importlib.import_module(f"{self.__name__}.{_HOMES.get(name, 'api')}"), name)
        except (ImportError, RuntimeError) as error:
            from mpips.collectives.errors import explain_missing_mpi

            if explain_missing_mpi(error):
                raise type(error)(explain_missing_mpi(error)) from None
            raise
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return sorted(__all__)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "plan" or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


# Users import this package as `collectives`, our own modules as `mpips.collectives`. `open_door` makes the first name
# an alias of the second.
if __name__ == "collectives":
    # `open_door` imports mpips. This tells mpips to leave uncaught errors to the program.
    opens_door = True
    from mpips.doors import open_door

    open_door(__name__)
else:
    sys.modules[__name__].__class__ = _Package
