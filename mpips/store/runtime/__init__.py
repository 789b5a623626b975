"""The ground of a store: its `generation`, `rendezvous` of ranks, `engine` (operations during compute), `errors`."""
