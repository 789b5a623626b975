"""Records what each rank does, in memory that outlives it: `page` has the layout, `own` this process' page."""
