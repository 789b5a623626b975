"""Show others what this rank does, in memory that outlives it: `page` is its layout, `own` this process' page."""
