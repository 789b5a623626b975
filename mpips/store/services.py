"""The kinds of services that servers offer besides keys. The rest of the store does not know the individual kinds."""

from mpips.tables.kind import TABLES

KINDS = (TABLES,)
