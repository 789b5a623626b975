"""How a rank ends: what it tells its launcher, how an error ends the job, and how MPI ends after a death."""
