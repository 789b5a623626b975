"""The kinds of services that servers have besides keys. The rest of the store does not know which there are."""

from mpips.tables.kind import TABLES

KINDS = (TABLES,)
