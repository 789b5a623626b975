"""`mpips doctor`: `survey` examines the machine, `probe` tries MPI on some ranks, and `__main__` judges the results."""
