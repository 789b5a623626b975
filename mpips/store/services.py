"""The services of a store: what its servers keep besides keys. This list is all that the store knows of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpips.store.worker.interface import WorkerService


def worker_services() -> Mapping[str, type[WorkerService]]:
    """Return the classes of workers' parts in services, by the services' names."""
    # imported late, because services are built on the store
    from mpips.tables.worker import WorkerTables

    return {WorkerTables.name: WorkerTables}
