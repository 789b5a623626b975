"""`mpips doctor`: look at the machine (`survey`), try MPI on real ranks (`probe`), say what is wrong (`judge`)."""
