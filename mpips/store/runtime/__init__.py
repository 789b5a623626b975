"""The ground of a store: `generation` (how it ends, and what comes next), `rendezvous` (ranks meet), `engine`
(operations beside compute), `errors`."""
