"""How a spare waits: it sleeps, looks now and then, and takes part in every recovery until it has a role."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from collectives.errors import CollectiveError
from mpips.recovery.renewal import renew
from mpips.runtime.epoch import Epoch

T = TypeVar("T")
SLEEP_SECONDS = 0.01


def wait(epoch: Epoch, rebuild: Callable[[], list[T]], committed: Callable[[], None]) -> T | None:
    """Wait until this rank has a role, and return what it is then; None where the store ends. Blocking.

    `rebuild` is this rank's part in an attempt to begin the next epoch: what the rank has become, or [] where it stays
    a spare. `committed` is called when an epoch has begun.
    """
    while not epoch.parting.closing():
        try:
            epoch.look()
        except CollectiveError as error:
            epoch.end("the wait of a spare", error)
        if epoch.over is None:
            time.sleep(SLEEP_SECONDS)
            continue
        became = renew(epoch, rebuild)
        if became is None:
            return None
        committed()
        if became:
            return became[0]
    return None
