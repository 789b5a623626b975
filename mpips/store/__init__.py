"""The key-value store: `create` makes a store, `api` has its calls, the other modules and folders implement them."""
