"""Several hosts on one machine: namespaces as hosts, bridges as switches, links at a rate, a real MPI across them.

Other packages use `client` (make, ask and end labs), `layout.lay_out` (plan a lab) and `kernel.find_missing` (what a
lab needs and this machine lacks).
"""
