"""`mpips doctor`: `survey` examines the machine, `probe` tries out MPI on ranks, and `__main__` judges the results."""
