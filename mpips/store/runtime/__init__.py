"""What every store is built on: its `generation`, `rendezvous` of ranks, `engine` (calls during compute), `errors`."""
