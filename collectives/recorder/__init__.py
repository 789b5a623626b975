"""Records what each rank does, in a file that outlives the rank: `page` is the file's layout, `own` writes the file."""
