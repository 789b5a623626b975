"""A lab: an emulated cluster on one machine, across which a real MPI job runs.

Network namespaces are the hosts, bridges are the switches, and every link has a rate limit. Other packages use `client`
(make, ask and end labs), `layout.lay_out` (plan a lab) and `kernel.find_missing` (check whether a lab can be made).
"""
