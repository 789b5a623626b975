"""Several hosts on one machine: namespaces as hosts, bridges as switches, links at a rate, a real MPI across them.

Offered to others: `client` (make, ask and end labs), `layout.lay_out` (their plan) and `kernel.find_missing`.
"""
