"""A lab: an emulated cluster on one machine, in which a real MPI job can run.

The hosts are network namespaces, the switches are bridges, and every link has a rate limit. Other packages use `client`
(make, query and end labs), `layout.lay_out` (plan a lab) and `kernel.find_missing` (check whether a lab can be made).
"""
