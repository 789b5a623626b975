"""The base of every store: `generation` (until a failure), `rendezvous` of ranks, `engine` (async calls), `errors`."""
