"""The kinds of services that servers have besides keys. The rest of the store does not know which there are."""

from __future__ import annotations

from mpips.store.server.service import ServiceKind
from mpips.tables.kind import Tables

KINDS: tuple[ServiceKind, ...] = (Tables(),)
