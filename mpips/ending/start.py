"""The start of MPI in this process: whether it has been, what is done then, and an interrupt that comes meanwhile.

mpi4py starts MPI when the program imports it. That comes back when all ranks have come.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_calls: list[Callable[[], None]] = []
"""What is to be done when MPI has started."""


def runs() -> bool:
    """Return whether MPI has been started here, or in the process of which this one is a fork."""
    module = sys.modules.get("mpi4py.MPI")
    return module is not None and bool(module.Is_initialized())


def when_started(call: Callable[[], None]) -> None:
    """Call it when the program has imported MPI, if that starts it; at once where it has started before."""
    if runs():
        call()
    elif "mpi4py.MPI" not in sys.modules:
        if not _calls:
            sys.meta_path.insert(0, _Importing())
        _calls.append(call)


class _Importing(MetaPathFinder):
    """Does what is to be done when MPI has started.

    An interrupt is held back until then, as an import that it breaks off leaves an MPI that runs and that nobody has:
    the others would wait for this rank. So it is an uncaught one, which ends the job.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "mpi4py.MPI":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            begin = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with _uninterrupted() as interrupts:
                    begin(module)
                    if module.Is_initialized():
                        for call in _calls:
                            call()
                if interrupts:
                    if module.Is_initialized() and module.COMM_WORLD.size > 1:
                        sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
                    raise KeyboardInterrupt

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextmanager
def _uninterrupted() -> Iterator[list[int]]:
    """Collect the interrupts that come within, where they would be a KeyboardInterrupt."""
    came: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield came
        return
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
