"""Records what each rank does, in a file that outlives it: `page` has the file's layout, `own` this process' file."""
