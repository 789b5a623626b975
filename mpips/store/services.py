"""The kinds of services that servers offer besides keys. The rest of the store does not depend on a single kind."""

from mpips.tables.kind import TABLES

KINDS = (TABLES,)
