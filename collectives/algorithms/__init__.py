"""One algorithm a file; `collectives.catalog` knows them by name."""
