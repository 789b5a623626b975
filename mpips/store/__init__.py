"""The store: `create` makes it, `api` has what users call; the other modules and folders keep it alive."""
