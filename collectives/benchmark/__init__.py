"""`mpips bench`, which times collectives: `case` makes the calls, `harness` times them, `report` shows the times."""

# the collectives on which gloo is compared
GLOO_KINDS = ("allreduce", "broadcast")
