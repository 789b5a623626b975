"""`mpips doctor`: look at the machine (`survey`), try MPI on ranks (`probe`), judge what was found (`__main__`)."""
