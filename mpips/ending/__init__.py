"""The life of a rank's process: its start, its end, and an error that ends the job."""
